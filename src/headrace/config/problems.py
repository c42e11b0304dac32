"""What is wrong with a configuration, in words: the key as it was written, and for an unknown one the nearest known."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from headrace.config.habits import OTHER_NAMES


def explain_all(kind: type[BaseModel], error: ValidationError, filled_from: Mapping[str, str]) -> list[str]:
    """Every problem once: not again for a key that `filled_from` says has its value from another."""
    found: dict[tuple[str, str], str] = {}
    for problem in error.errors():
        place = _trace(kind, problem)
        name = ".".join(str(part) for part in place.path)
        origins = [f"{s}{name.removeprefix(t)}" for t, s in filled_from.items() if f"{name}.".startswith(f"{t}.")]
        if not any((origin, problem["type"]) in found for origin in origins):
            found[name, problem["type"]] = _explain(kind, problem, place)
    return list(found.values())


def _explain(kind: type[BaseModel], problem: Any, place: _Place) -> str:
    name = ".".join(str(part) for part in place.path) or "configuration"
    if problem["type"] == "extra_forbidden":
        close = _nearest(kind, place)
        if close == _without_positions(place.path):
            return f"{name}: a key of another `type`; this one has {', '.join(place.known)}"
        return f"{name}: unknown key." + (f" Did you mean {close}?" if close else "")
    if problem["type"] == "missing":
        return f"{name}: required, and not set"
    if problem["type"] in _EXPECTED:
        return f"{name}: {_EXPECTED[problem['type']]} is expected, not {_shown(problem['input'], name)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {message}" if place.path else message
    return f"{name}: {message} (got {_shown(problem['input'], name)})"


_EXPECTED = {
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
    "list_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
}
"""By pydantic's name of a problem: what it wants, where it would speak of its own classes."""


class NoNumber(NamedTuple):
    """Stands for true or false where a number belongs, since pydantic would take them for 1 and 0."""

    given: bool


def _shown(value: Any, name: str) -> str:
    if isinstance(value, NoNumber):
        value = value.given
    if value is True:
        return f"true, which --{name} without a value means"
    return "false" if value is False else repr(value)


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


class _Member(NamedTuple):
    """One of the types that a value may have."""

    kind: Any
    tags: tuple[str, ...] = ()
    """What pydantic calls it in a location, to tell it from the others."""


def _trace(kind: type[BaseModel], problem: Any) -> _Place:
    """Follow a location from the root, leaving out what pydantic adds to it: tags, and names of types."""
    unknown = problem["type"] == "extra_forbidden"
    parts = problem["loc"][:-1] if unknown else problem["loc"]
    path: list[Any] = []
    members = [_Member(kind)]
    for part in parts:
        chosen = [member for member in members if part in member.tags] if len(members) > 1 else []
        inside = [inner for member in members for inner in _inside(member.kind, part)]
        if chosen:
            members = chosen
        elif inside:
            path.append(part)
            members = [member for annotation in inside for member in _members(annotation)]
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


def _members(annotation: Any, tags: tuple[str, ...] = ()) -> Iterator[_Member]:
    """The types that an annotation allows, looking through options and unions."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from _members(inner, tuple(entry.tag for entry in metadata if isinstance(entry, Tag)))
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("type")
        own = get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()
        yield _Member(annotation, (*tags, *own))
    elif annotation is not types.NoneType:
        yield _Member(annotation, tags)


def kinds_of(annotation: Any) -> set[Any]:
    """The same types without their tags."""
    return {member.kind for member in _members(annotation)}


def _paths(kind: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for name in kind.model_fields:
        yield (*prefix, name)
        for child in sections_of(kind, name):
            yield from _paths(child, (*prefix, name))


def fields_at(kind: type[BaseModel], path: Iterable[str]) -> list[str]:
    """The keys of the section at `path`."""
    sections = [kind]
    for part in path:
        sections = [
            child for section in sections if part in section.model_fields for child in sections_of(section, part)
        ]
    return [name for section in sections for name in section.model_fields]


def sections_of(kind: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """The section types that a field may hold, looking through lists, options and unions."""
    found: list[type[BaseModel]] = []
    pending: list[Any] = [kind.model_fields[name].annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        pending.extend(getattr(annotation, "__args__", ()))
    return found
