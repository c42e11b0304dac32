"""Checks of the arguments that a run file gives to an environment. A `BadArgument` names the one that does not fit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from headrace.errors import BadInput

Made = TypeVar("Made")


class BadArgument(BadInput):
    """An argument that is missing, unknown, or has a value that will not do."""


def bound(function: Callable[..., Made], args: dict[str, Any], first: Sequence[Any] = ()) -> Callable[[], Made]:
    """The function with these arguments, those without a name first, to be called later; checked now."""
    try:
        inspect.signature(function).bind(*first, **args)
    except TypeError as error:
        raise BadArgument(str(error)) from error
    return functools.partial(function, *first, **args)


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """A whole number from `low` to `high`, both included."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise BadArgument(f"{name} must be a whole number {bounds}, not {value!r}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise BadArgument(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise BadArgument(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def check_letters(name: str, value: Any, letters: Collection[str]) -> None:
    """A text of at least one of these letters, in any order and number."""
    if not (isinstance(value, str) and value and set(value) <= set(letters)):
        raise BadArgument(f"{name} must be some of {' '.join(letters)}, not {value!r}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise BadArgument(f"{name} must be true or false, not {value!r}")


def check_mistakes(share: Any) -> None:
    check_number("demonstrate_mistakes", share, 0, 1)
