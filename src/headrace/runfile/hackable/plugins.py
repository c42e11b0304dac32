"""Check the plugins of a short run file and their kwargs. Problems name the key that the user wrote.

The user's own code is imported and the objective is constructed; data is read only to count its samples.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
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
"""The kwarg for which null has a meaning: count words, not tokens of the run's model."""
FILLED = frozenset({"tokenizer_name", "seed"})
"""Kwargs that the run fills in."""


class Plugin(NamedTuple):
    """A plugin of a run file."""

    registry: PluginRegistry
    name: str
    key: str
    """The key of its kwargs: `objective.kwargs`."""

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return self.registry.options(self.name)


def objective_named(name: str) -> Plugin:
    from headrace.environments.hackable.registry import OBJECTIVES

    return Plugin(OBJECTIVES, name, "objective.kwargs")


def provider_named(name: str, key: str = "data.kwargs") -> Plugin:
    from headrace.environments.hackable.registry import DATA_PROVIDERS

    return Plugin(DATA_PROVIDERS, name, key)


def reward_named(name: str) -> Plugin:
    from headrace.environments.rewards.registry import REWARDS

    return Plugin(REWARDS, name, f"rewards.kwargs.{name}")


def check_kwargs(plugin: Plugin, kwargs: Mapping[str, Any], problems: list[BadInput], *, needed: bool = True) -> Kwargs:
    """Return kwargs without nulls, with texts read as the numbers or booleans that the plugin takes.

    Unknown kwargs, and if `needed` missing ones, are added to `problems`. A null that has a meaning becomes an empty
    text, since TOML has no null.
    """
    parameters, noun = plugin.parameters, plugin.registry.what
    known = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    values = {name: v for name, v in kwargs.items() if v is not None or (name == WORDS_IF_NULL and name in known)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in [name for name in values if name not in known and not takes_any]:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {plugin.key}.{close[0]}? " if close else ""
        fix = f"{hint}{noun.capitalize()} {plugin.name!r} takes {', '.join(known) or 'no kwargs'}."
        problems.append(BadInput("unknown key", key=f"{plugin.key}.{name}", fix=fix))
    for name in known if needed else ():
        if parameters[name].default is inspect.Parameter.empty and name not in {*values, *FILLED}:
            fact = f"required by {noun} {plugin.name!r}, and not set"
            problems.append(BadInput(fact, key=f"{plugin.key}.{name}"))
    for name, value in values.items():
        if value is None:
            values[name] = ""
        elif isinstance(value, str) and name in parameters:
            values[name] = read_as(kinds_of(parameters[name]), value)
    return values


def kinds_of(parameter: inspect.Parameter) -> set[str]:
    """Return the plain types of a parameter, by its annotation or its default; empty if it also takes other types."""
    annotation: Any = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return {type(parameter.default).__name__} & (PLAIN - {"NoneType"})
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    words = set(re.findall(r"\w+", text if "|" not in str(annotation) else str(annotation)))
    return words if words <= PLAIN else set()


def read_as(kinds: set[str], text: str) -> Any:
    """Return the number or boolean that a text stands for, else the text."""
    if "bool" in kinds and text.strip().lower() in WORDS:
        return WORDS[text.strip().lower()]
    for kind, read in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def construct_objective(plugin: Plugin, kwargs: Kwargs, problems: list[BadInput]) -> Objective | None:
    """Return the objective; None where its own checks refuse its kwargs."""
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


def is_registered(plugin: Plugin, key: str, problems: list[BadInput]) -> bool:
    """Return whether the plugin exists; `key` is the one that names it."""
    try:
        plugin.registry.find(plugin.name)
    except BadInput as error:
        problems.append(BadInput(error.fact, key=key, value=plugin.name, fix=error.fix))
        return False
    return True


def count_samples(name: str, kwargs: Kwargs, seed: int, variables: Mapping[str, str]) -> int:
    """Count the samples of a provider under the environment variables of the run's processes."""
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


def needs_hub(plugin: Plugin, kwargs: Mapping[str, Any], is_name: Callable[[str], bool]) -> bool:
    """Return whether a source of the plugin, set or default, is neither on this machine nor in its `cache_dir`."""
    values = {p.name: p.default for p in plugin.parameters.values()} | dict(kwargs)
    sources = [value for name, value in values.items() if is_name(name) and isinstance(value, str) and value]
    cache = Path(values.get("cache_dir") or ".")
    return any(not (Path(name).exists() or (cache / name).exists()) for name in sources)
