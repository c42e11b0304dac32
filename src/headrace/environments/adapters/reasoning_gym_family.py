"""A reasoning-gym family: its settings, its entries as JSON, its scorer. For processes that import the library.

A task has the whole entry, so that scoring an answer does not generate it again. Types that JSON does not have are
encoded, because scorers distinguish a tuple from a list.

Left out: mixtures ("composite"), which a run has as several environments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Collection
from datetime import date, time
from enum import Enum
from functools import cache
from typing import Any

import msgspec
import numpy as np

from headrace.environments.adapters import library
from headrace.errors import BadInput

EXTRA = "reasoning-gym"
OURS = {"seed": "seed", "size": "num_tasks"}
"""Settings of every family that the environment sets, and the arguments to use instead."""
TUPLE, DICT, SET, WHOLE = "(tuple)", "(dict)", "(set)", "(int)"
"""Keys of an object that encodes a type which JSON does not have."""
MAX_INT = 2**63 - 1
SCORE_TOLERANCE = 1e-6
"""How far a score may be outside of 0 to 1: some are sums of fractions."""


class Family:
    """A family by name, with some of its settings; `made(seed, size)` returns its dataset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        known = library("reasoning_gym", EXTRA).factory.DATASETS
        if name == "composite":
            fix = "Give each of its families its own environment."
            raise BadInput("a mixture of families", value=f"reasoning-gym:{name}", fix=fix)
        if name not in known:
            raise BadInput("unknown family", value=f"reasoning-gym:{name}", fix=_nearest(name, known))
        self.name = name
        self._dataset, self._config = known[name]
        defaults = {field.name: _default(field) for field in dataclasses.fields(self._config)}
        free = sorted(defaults.keys() - OURS.keys())
        for setting, value in settings.items():
            if setting in OURS:
                fact, fix = "not a setting to choose", f"Set {OURS[setting]} instead."
                raise BadInput(fact, key=f"args.{setting}", value=value, fix=fix)
            if setting not in free:
                fact = f"unknown setting of reasoning-gym:{name}"
                raise BadInput(fact, key=f"args.{setting}", value=value, fix=_nearest(setting, free))
        self._settings = settings
        self._defaults = defaults

    def made(self, seed: int, size: int) -> Any:
        """Return a dataset of `size` entries; entry `i` of some families depends only on `seed + i`."""
        try:
            settings = {name: _shaped(value, self._defaults[name]) for name, value in self._settings.items()}
            config = self._config(**settings, seed=seed, size=size)
            if hasattr(config, "validate"):
                config.validate()
            return self._dataset(config)
        except Exception as error:
            fact = f"refused by reasoning-gym:{self.name}: {str(error) or type(error).__name__}"
            raise BadInput(fact, key="args", value=self._settings) from error


@cache
def _scorer(family: str, settings: bytes) -> Any:
    return Family(family, msgspec.json.decode(settings)).made(seed=0, size=1)


def score(family: str, settings: dict[str, Any], answer: str, task: dict[str, Any]) -> float:
    """Return the score of an answer by the family's scorer, from 0 to 1. Raises whatever the scorer raises."""
    scorer = _scorer(family, msgspec.json.encode(settings, order="deterministic"))
    entry = {**task, "metadata": restored(task["metadata"])}
    with contextlib.redirect_stdout(None):  # some of them print
        value = scorer.score_answer(answer, entry)
    number = float(value)
    if not -SCORE_TOLERANCE <= number <= 1 + SCORE_TOLERANCE:
        raise ValueError(f"the scorer gave {value!r}, which is not from 0 to 1")
    return min(1.0, max(0.0, number))


def as_task(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a dataset as JSON."""
    answer = entry["answer"]
    return {
        "question": str(entry["question"]),
        "answer": None if answer is None else str(answer),
        "metadata": portable(entry["metadata"]),
    }


def portable(value: Any) -> Any:
    """Return a value as JSON; `restored` is the inverse, except that numpy types become plain and sets frozen."""
    match value:
        case None | bool():
            return value
        case np.generic() | np.ndarray():
            return portable(value.tolist())
        case str():
            return str.__str__(value)
        case int():
            return int(value) if abs(value) <= MAX_INT else {WHOLE: str(int(value))}
        case float():
            return float(value)
        case list():
            return [portable(entry) for entry in value]
        case tuple():
            return {TUPLE: [portable(entry) for entry in value]}
        case set() | frozenset():
            return {SET: sorted((portable(entry) for entry in value), key=msgspec.json.encode)}
        case dict() if all(type(key) is str and key not in _RESTORE for key in value):
            return {key: portable(entry) for key, entry in value.items()}
        case dict():
            return {DICT: [[portable(key), portable(entry)] for key, entry in value.items()]}
    raise TypeError(f"its metadata has a {type(value).__name__}, which cannot be passed on")


def restored(value: Any) -> Any:
    """Return the value that `portable` encoded."""
    match value:
        case list():
            return [restored(entry) for entry in value]
        case dict():
            if len(value) == 1 and (kind := next(iter(value))) in _RESTORE:
                return _RESTORE[kind](restored(value[kind]))
            return {key: restored(entry) for key, entry in value.items()}
    return value


_RESTORE = {TUPLE: tuple, DICT: dict, SET: frozenset, WHOLE: int}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _shaped(value: Any, like: Any) -> Any:
    """Return a setting of a run file in the type of the family's default, such as a list as a tuple."""
    if isinstance(value, list) and isinstance(like, list | tuple):
        return type(like)(_shaped(entry, like[0] if like else None) for entry in value)
    if isinstance(value, dict) and dataclasses.is_dataclass(like) and not isinstance(like, type):
        return type(like)(**{name: _shaped(entry, getattr(like, name, None)) for name, entry in value.items()})
    if isinstance(like, Enum):
        return type(like)(value)
    if isinstance(value, str) and isinstance(like, date | time):
        return type(like).fromisoformat(value)
    return value


def _nearest(name: str, known: Collection[str]) -> str:
    """Return a hint with the closest name and all names."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known)) or 'none'}."
