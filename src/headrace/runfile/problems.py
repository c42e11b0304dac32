"""Explain what is wrong with a configuration: the key and its source, and for an unknown key the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headrace.config.annotations import Member, NoNumber, members_of, sections_in
from headrace.config.base import COMMAND_LINE, Origins
from headrace.errors import BadInput, InvalidValue
from headrace.runfile.foreign_keys import HINTS, OTHER_NAMES


def explain_all(
    kind: type[BaseModel], error: ValidationError, filled_from: Mapping[str, str], origins: Origins
) -> list[BadInput]:
    """Every problem once: not again for a key that `filled_from` says has its value from another."""
    found: dict[tuple[str, str], BadInput] = {}
    for problem in error.errors():
        place = _trace(kind, problem)
        name = ".".join(str(part) for part in place.path)
        if not any((source, problem["type"]) in found for source in filled_sources(name, filled_from)):
            found[name, problem["type"]] = located(_explain(kind, problem, place), origins)
    return list(found.values())


def filled_sources(key: str, filled_from: Mapping[str, str]) -> list[str]:
    """Return the keys from which this one has its value where none is written."""
    return [f"{s}{key.removeprefix(t)}" for t, s in filled_from.items() if f"{key}.".startswith(f"{t}.")]


def located(problem: BadInput, origins: Origins) -> BadInput:
    """Name the file in which the key is written; a key from the command line is named as an option."""
    source = origins.of(problem.key or "")
    if source != COMMAND_LINE:
        problem.file = source
    elif problem.key:
        problem.key = f"--{problem.key}"
    return problem


def _explain(kind: type[BaseModel], problem: Any, place: _Place) -> BadInput:
    """Turn a problem of pydantic into an error whose key is the whole dotted one."""
    name = ".".join(str(part) for part in place.path)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValue):
        key = ".".join(part for part in (name, cause.key) if part)
        return BadInput(cause.fact, key=key, value=cause.value, fix=cause.fix, file=cause.file, line=cause.line)
    if problem["type"] == "extra_forbidden":
        close = _nearest(kind, place)
        if close == _without_positions(place.path):
            return BadInput("a key of another `type`", key=name, fix=f"This one has {', '.join(place.known)}.")
        fix = HINTS.get(str(place.path[-1])) or (f"Did you mean {close}?" if close else None)
        return BadInput("unknown key", key=name, fix=fix)
    if problem["type"] == "missing":
        return BadInput("required, and not set", key=name)
    if problem["type"] == "value_error":
        return BadInput(problem["msg"].removeprefix("Value error, "), key=name)
    return _wrong_value(problem, name)


def _wrong_value(problem: Any, name: str) -> BadInput:
    """Explain a value of the wrong type or out of range."""
    value = problem["input"].given if isinstance(problem["input"], NoNumber) else problem["input"]
    fact = _EXPECTED.get(problem["type"]) or problem["msg"].replace("Input should be", "must be")
    fix = None
    if value is True:
        fix = f"--{name} without a value means true: give it one."
    elif problem["type"] == "list_type" and isinstance(value, dict):
        fix = f"Write [[{name}]], once for each entry."
        value = None
    return BadInput(fact, key=name or "configuration", value=value, fix=fix)


_EXPECTED = {
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""By pydantic's name of a problem: what it wants, where it would speak of its own classes."""


def _nearest(kind: type[BaseModel], place: _Place) -> str | None:
    """The known key closest to the last part, first among those beside it, then anywhere in the tree."""
    *parents, last = place.path
    wrong = str(last)
    ours = OTHER_NAMES.get(wrong)
    match = [ours] if ours in place.known else difflib.get_close_matches(wrong, place.known, n=1, cutoff=0.6)
    if match:
        return ".".join(str(part) for part in (*parents, match[0]))
    everywhere = [".".join(path) for path in _paths(kind)]
    exact = [path for path in everywhere if path.split(".")[-1] in (wrong, ours)]
    return exact[0] if exact else None


def _without_positions(path: list[Any]) -> str:
    """A key as explanations name it: the same for every entry of a list."""
    return ".".join(part for part in path if isinstance(part, str))


class _Place(NamedTuple):
    path: list[Any]
    """The key as it was written."""
    known: list[str]
    """For an unknown key: those that its section knows."""


def _trace(kind: type[BaseModel], problem: Any) -> _Place:
    """Follow a location from the root, leaving out what pydantic adds to it: tags, and names of types."""
    unknown = problem["type"] == "extra_forbidden"
    parts = problem["loc"][:-1] if unknown else problem["loc"]
    path: list[Any] = []
    members = [Member(kind)]
    for part in parts:
        chosen = [member for member in members if part in member.tags] if len(members) > 1 else []
        inside = [inner for member in members for inner in _inside(member.kind, part)]
        if chosen:
            members = chosen
        elif inside:
            path.append(part)
            members = [member for annotation in inside for member in members_of(annotation)]
    if unknown:
        path.append(problem["loc"][-1])
    return _Place(path, [name for member in members for name in getattr(member.kind, "model_fields", ())])


def _inside(kind: Any, part: Any) -> list[Any]:
    """The types of what `part` leads to."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind.model_fields[part].annotation] if part in kind.model_fields else []
    if get_origin(kind) is dict and part != "[key]":
        return [get_args(kind)[1]]
    return list(get_args(kind)) if isinstance(part, int) else []


def _paths(kind: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for name in kind.model_fields:
        yield (*prefix, name)
        for child in sections_in(kind.model_fields[name].annotation):
            yield from _paths(child, (*prefix, name))
