"""Checks of the arguments that a run file gives to an environment. A `TypeError` names the one that does not fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """A whole number from `low` to `high`, both included."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise TypeError(f"{name} must be a whole number {bounds}, not {value!r}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise TypeError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    if value not in choices:
        raise TypeError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, not {value!r}")


def check_mistakes(share: Any) -> None:
    check_number("demonstrate_mistakes", share, 0, 1)
