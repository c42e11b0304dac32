"""Whether the plugins that a file names are there and take their kwargs; what is wrong, by the key as it was written.

It imports the user's own code, and constructs the objective; data is read only to be counted.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.config.launch import without_exported
from headrace.errors import BadInput

if TYPE_CHECKING:
    from headrace.environments.hackable.objective import Objective
    from headrace.environments.plugins import PluginRegistry

Kwargs = dict[str, Any]
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
PLAIN = {"int", "float", "bool", "None", "Optional", "NoneType"}
WORDS_IF_NULL = "tokenizer_name"
"""The kwarg to which null says something: count words, and not tokens of the run's model."""
FILLED = frozenset({"tokenizer_name", "seed"})
"""Kwargs that the run fills in."""


class Plugin(NamedTuple):
    """One that a file names: `key` is the section that has its kwargs, as `objective.kwargs`."""

    registry: PluginRegistry
    name: str
    key: str

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its kwargs."""
        return self.registry.options(self.name)

    @property
    def is_curriculum(self) -> bool:
        """Whether its kwargs name other data providers."""
        from headrace.environments.hackable.providers.curriculum import curriculum

        return self.registry.find(self.name) is curriculum

    @property
    def takes_any(self) -> bool:
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())


def objective_named(name: str) -> Plugin:
    from headrace.environments.hackable.registry import OBJECTIVES

    return Plugin(OBJECTIVES, name, "objective.kwargs")


def provider_named(name: str, key: str = "data.kwargs") -> Plugin:
    from headrace.environments.hackable.registry import DATA_PROVIDERS

    return Plugin(DATA_PROVIDERS, name, key)


def reward_named(name: str) -> Plugin:
    from headrace.environments.rewards.registry import REWARDS

    return Plugin(REWARDS, name, f"rewards.kwargs.{name}")


def normalized(plugin: Plugin, kwargs: Mapping[str, Any], problems: list[BadInput], *, needed: bool = True) -> Kwargs:
    """Its kwargs with numbers for texts that are meant as such, and without those that are null, and so taken back.

    One that is not `needed` may lack some.
    """
    parameters = plugin.parameters
    known = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = {name: v for name, v in kwargs.items() if v is not None or (name == WORDS_IF_NULL and name in known)}
    for name in given if not plugin.takes_any else ():
        if name not in known:
            problems.append(_unknown(plugin, name, known))
    for name in known if needed else ():
        if parameters[name].default is inspect.Parameter.empty and name not in {*given, *FILLED}:
            fact = f"required by {plugin.registry.what} {plugin.name!r}, and not set"
            problems.append(BadInput(fact, key=f"{plugin.key}.{name}"))
    return {name: _value(parameters.get(name), value) for name, value in given.items()}


def _unknown(plugin: Plugin, name: str, known: Sequence[str]) -> BadInput:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {plugin.key}.{close[0]}? " if close else ""
    takes = f"{plugin.registry.what.capitalize()} {plugin.name!r} takes {', '.join(known) or 'no kwargs'}."
    return BadInput("unknown key", key=f"{plugin.key}.{name}", fix=hint + takes)


def _value(parameter: inspect.Parameter | None, value: Any) -> Any:
    """Null is no value of TOML: where it says something, it is an empty text instead."""
    if value is None:
        return ""
    if parameter is None or not isinstance(value, str):
        return value
    return read_as(kinds_of(parameter), value)


def kinds_of(parameter: inspect.Parameter) -> set[str]:
    """The plain types that a parameter takes, by its annotation or its default; none if it also takes others."""
    annotation: Any = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return {type(parameter.default).__name__} & (PLAIN - {"NoneType"})
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    words = set(re.findall(r"\w+", text if "|" not in str(annotation) else str(annotation)))
    return words if words <= PLAIN else set()


def read_as(kinds: set[str], text: str) -> Any:
    """A number or a truth value that was written as a text; the text where it is none."""
    if "bool" in kinds and text.strip().lower() in WORDS:
        return WORDS[text.strip().lower()]
    for kind, read in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def constructed(plugin: Plugin, kwargs: Kwargs, problems: list[BadInput]) -> Objective | None:
    """The objective; None where its own checks refuse its kwargs."""
    from headrace.environments.hackable.registry import build_objective

    try:
        return build_objective(plugin.name, kwargs)
    except BadInput as error:
        cause = error.__cause__ if isinstance(error.__cause__, BadInput) else error
        name, _, fact = (cause.key, "", cause.fact) if cause.key else cause.fact.partition(" ")
        if name in kwargs:
            problems.append(BadInput(fact, key=f"{plugin.key}.{name}", value=kwargs[name], fix=cause.fix))
        else:
            problems.append(BadInput(cause.fact, key=plugin.key, fix=cause.fix))
        return None


def found(plugin: Plugin, key: str, problems: list[BadInput]) -> bool:
    """Whether there is such a plugin; `key` is where its name was written."""
    try:
        plugin.registry.find(plugin.name)
    except BadInput as error:
        problems.append(BadInput(error.fact, key=key, value=plugin.name, fix=error.fix))
        return False
    return True


def number_of_samples(name: str, kwargs: Kwargs, seed: int, variables: Mapping[str, str]) -> int:
    """How many the provider gives; it finds the environment that the run's processes will have."""
    from headrace.environments.hackable.registry import build_data_provider

    with _environment(variables):
        return sum(1 for _ in build_data_provider(name, kwargs, seed))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    variables = without_exported(variables)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def asks_the_hub(plugin: Plugin, kwargs: Mapping[str, Any], is_name: Callable[[str], bool]) -> bool:
    """Whether one of its sources, set or not, is nothing on this machine, nor in its `cache_dir`."""
    values = {p.name: p.default for p in plugin.parameters.values()} | dict(kwargs)
    named = [value for name, value in values.items() if is_name(name) and isinstance(value, str) and value]
    cache = Path(values.get("cache_dir") or ".")
    return any(not (Path(name).exists() or (cache / name).exists()) for name in named)
