"""Load, name and check the functions and classes that users write for a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from headrace import imports
from headrace.errors import BadInput

T = TypeVar("T")


def load_function(import_path: str, kwargs: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """Return a user's function with its kwargs bound; it takes one more argument. `what` is for errors."""
    function = imports.load(import_path, what)
    check_kwargs(function, (None,), kwargs, what, import_path)
    if inspect.iscoroutinefunction(function):
        raise BadInput(
            "it is an async function, which nothing awaits",
            key=what,
            value=import_path,
            fix="Write a plain function, or a subclass of headrace.algorithms.base.Algorithm, whose hooks may wait.",
        )
    return partial(function, **kwargs)


def load_class(import_path: str, base: type[T], args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> type[T]:
    """Return a user's subclass of `base` that takes these arguments; it is not constructed. `what` is for errors."""
    kind = imports.load(import_path, what)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise BadInput(f"not a subclass of {base.__module__}.{base.__name__}", key=what, value=import_path)
    check_kwargs(kind, args, kwargs, what, import_path)
    return kind


def check_kwargs(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str, import_path: str
) -> None:
    """Raise `BadInput` if `called` does not take these arguments; it is not called."""
    try:
        inspect.signature(called).bind(*args, **kwargs)
    except TypeError as error:
        raise BadInput(f"it does not take these kwargs: {error}", key=what, value=import_path) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the import path of a function: `package.module:function`."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def numbers(given: Any, function: Callable[..., Any]) -> np.ndarray:
    """Return the result of `function` as float64; raise unless all numbers are finite."""
    try:
        values = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name_of(function)} returned something other than an array of numbers: {error}") from error
    if not np.isfinite(values).all():
        raise ValueError(
            f"{name_of(function)} returned {values[~np.isfinite(values)][0]}: it must return finite numbers"
        )
    return values
