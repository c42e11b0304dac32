"""Checks of an environment's arguments from a run file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from headrace import imports
from headrace.errors import BadInput, suggest_similar

Made = TypeVar("Made")


class BadArgument(BadInput):
    """An argument that is missing, unknown, or has an invalid value."""


def bind_args(
    function: Callable[..., Made],
    args: dict[str, Any],
    first: Sequence[Any] = (),
    within: str = "",
    caller: type | None = None,
) -> Callable[[], Made]:
    """Check that the function takes these positional and keyword arguments, and return it with them bound.

    In errors, `within` is a prefix of argument names, such as `task_args.`, and the arguments of `caller`, the
    environment that passes these on, are known ones, too.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*first, **args)
    except TypeError as error:
        parameters = list(signature.parameters.values())[len(first) :]
        named = _named(parameters)
        others = _named(inspect.signature(caller).parameters.values()) if caller else []
        known = [p.name for p in (*named, *others)]
        fix = f"Known arguments: {', '.join(known) or 'none'}."
        unknown = args.keys() - {p.name for p in named}
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            wrong = min(unknown)
            fix = suggest_similar(wrong, known, fix, prefix=within)
            raise BadArgument("unknown argument", key=within + wrong, value=args[wrong], fix=fix) from error
        missing = [p.name for p in named if p.default is p.empty and p.name not in args]
        fact = "required, but not set" if missing else str(error)
        raise BadArgument(fact, key=within + missing[0] if missing else None, fix=fix) from error
    return functools.partial(function, *first, **args)


def _named(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def import_argument(name: str, path: str) -> Any:
    """Return the object at the import path that the argument `name` gives."""
    try:
        return imports.load(path, name)
    except BadInput as error:
        raise BadArgument(error.fact, key=name, value=path, fix=error.fix) from error


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise unless the value is an integer from `low` to `high`, both included."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise BadArgument(f"expected a whole number {bounds}", key=name, value=value)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise BadArgument(f"expected a number from {low:g} to {high:g}", key=name, value=value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise BadArgument(f"expected {' or '.join(map(repr, choices))}", key=name, value=value)


def check_letters(name: str, value: Any, letters: Collection[str]) -> None:
    """Raise unless the value is a text of one or more of these letters."""
    if not (isinstance(value, str) and value and set(value) <= set(letters)):
        raise BadArgument(f"expected a text of one or more of {' '.join(letters)}", key=name, value=value)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise BadArgument("expected true or false", key=name, value=value)


def check_mistakes(share: Any) -> None:
    check_number("demonstrate_mistakes", share, 0, 1)
