"""Rewards by name, by import path (`package.module:name`) or by file (`path/to/file.py:name`).

A shipped reward is registered by a module of this folder: its signature declares the options, its docstring the
description, its constructor the checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.environments.arguments import BadArgument, check_choice
from headrace.environments.plugins import PluginRegistry
from headrace.environments.rewards.base import AnyReward, Data, form_of, scaled
from headrace.environments.strict_format import format_of
from headrace.errors import BadInput

PARTS = ("all", "answer")
Options = Mapping[str, Any]
Kind = TypeVar("Kind", bound=type)


def _call_arguments(reward: Callable[..., Any]) -> int:
    """Return how many parameters are not options; TRL's form has no options."""
    form = form_of(reward)
    return len(inspect.signature(reward).parameters) if form == "columns" else 4 if form == "batch" else 2


REWARDS = PluginRegistry("reward", "headrace.environments.rewards", _call_arguments)
register_reward = REWARDS.decorator


def register_with_part(name: str) -> Callable[[Kind], Kind]:
    """Register a reward class with one more option, `part`.

    With `part = "answer"` the reward sees only the boxed answer of the strict format, and a malformed completion scores
    0. The decorated class itself stays as it is.
    """

    def register(kind: Kind) -> Kind:
        base: Any = kind

        class WithPart(base):  # type: ignore[misc]
            def __init__(self, *args: Any, part: str = "all", **kwargs: Any) -> None:
                check_choice("part", part, PARTS)
                super().__init__(*args, **kwargs)
                self._answer_only = part == "answer"

            def __call__(self, text: str, data: Data) -> Any:
                if self._answer_only:
                    parsed = format_of(data).parse(text)
                    if parsed is None:
                        return 0.0
                    text = parsed.answer
                return super().__call__(text, data)

        signature = inspect.signature(kind)
        part = inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY, default="all", annotation="str")
        WithPart.__signature__ = signature.replace(parameters=[*signature.parameters.values(), part])
        WithPart.__doc__, WithPart.__module__ = kind.__doc__, kind.__module__
        WithPart.__qualname__ = WithPart.__name__ = kind.__name__
        REWARDS.register(WithPart, name)
        return kind

    return register


def build_reward(name: str, options: Options | None = None) -> AnyReward:
    """Return a reward with its options: an instance of a class, or a function with the options bound."""
    is_class = isinstance(REWARDS.find(name), type)
    reward: Any = (REWARDS.construct if is_class else REWARDS.bind)(name, options or {})
    if not callable(reward):
        fix = "Give its class __call__(self, text, data)."
        raise BadInput("it cannot be called", key="reward", value=name, fix=fix)
    return reward  # type: ignore[no-any-return]


def build_rewards(names: Iterable[str], options: Mapping[str, Options] | None = None) -> dict[str, AnyReward]:
    """Return the rewards of an objective, each with its own options. Those of other known rewards have no effect."""
    used = list(names)
    matched = options_by_reward(used, options or {})
    for name in matched:
        if name not in used:
            REWARDS.find(name)
    return {name: build_reward(name, matched.get(name)) for name in used}


def options_by_reward(names: Sequence[str], options: Mapping[str, Options]) -> dict[str, Options]:
    """Return options by the name of their reward: a reward given by path may be named by its last part.

    Options of other rewards stay under their name.
    """
    matched: dict[str, Options] = {}
    for key, own in options.items():
        paths = [] if key in names else [name for name in names if name.rpartition(":")[2] == key]
        if len(paths) > 1:
            raise BadInput(f"the last part of {' and of '.join(paths)}", key=key, fix="Write the whole path.")
        name = paths[0] if paths else key
        if name in matched:
            fact = f"the same reward as {name}, whose kwargs are also set"
            raise BadInput(fact, key=key, fix="Set one of the two.")
        matched[name] = own
    return matched


class RewardTable(msgspec.Struct, forbid_unknown_fields=True):
    """A reward as a run file has it, where a name alone does not do."""

    name: str
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    weight: float = 1.0


def build_from(value: Any, key: str) -> AnyReward:
    """Return a reward given as such, by name, or as a table of `name`, `kwargs` and `weight`; `key` is where it is set.

    A reward by name is called as the last part of its name, where it has none of its own.
    """
    if isinstance(value, str | Mapping):
        try:
            table = RewardTable(value) if isinstance(value, str) else msgspec.convert(value, RewardTable)
            reward = build_reward(table.name, table.kwargs)
        except msgspec.ValidationError as error:
            raise BadArgument(str(error), key=key, value=value, fix="A table has name, kwargs and weight.") from error
        except BadInput as error:
            place = key if error.key in (None, "reward") else f"{key}.kwargs.{error.key}"
            raise BadArgument(error.fact, key=place, value=error.value, fix=error.fix) from error
        value = scaled(reward, table.weight) if table.weight != 1.0 else reward
        if not getattr(value, "name", ""):
            value.name = table.name.rpartition(":")[2]
    if not callable(value):
        raise BadArgument(f"a {type(value).__name__}, which cannot be called", key=key)
    return value  # type: ignore[no-any-return]
