"""Read the annotation of a field: the sections and plain types that it allows behind options, unions and lists."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag

IMPORTED = "imported"
"""The tag of the alternative that is named by an import path, `package.module:Class`."""


class NoNumber(NamedTuple):
    """Replaces a boolean where a number belongs, so that pydantic refuses it."""

    given: bool


class Member(NamedTuple):
    """One of the types that a value may have."""

    kind: Any
    tags: tuple[str, ...] = ()
    """The names under which pydantic locates an error in this member of a union."""


def members_of(annotation: Any, tags: tuple[str, ...] = ()) -> Iterator[Member]:
    """Yield the types that an annotation allows, looking through options, unions and registries."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from members_of(inner, tuple(entry.tag for entry in metadata if isinstance(entry, Tag)))
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from members_of(member)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for section in alternatives_of(annotation):
            own = type_values(section) or ((IMPORTED,) if "type" in section.model_fields else ())
            yield Member(section, (*tags, *own))
    elif annotation is not types.NoneType:
        yield Member(annotation, tags)


def kinds_of(annotation: Any) -> set[Any]:
    """Return the types that an annotation allows."""
    return {member.kind for member in members_of(annotation)}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation allows, each once, in its order, looking through lists and tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return alternatives_of(annotation)
    if get_origin(annotation) is Literal:
        return []
    return list(dict.fromkeys(section for inner in get_args(annotation) for section in sections_in(inner)))


def alternatives_of(section: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the sections that a field of this type takes: the registered ones for the base class of a registry."""
    sections: list[type[BaseModel]] = getattr(section, "alternatives", lambda: [section])()
    return sections


def type_values(section: type[BaseModel]) -> tuple[Any, ...]:
    """Return the values of `type` that choose a section; none where any text does, or where it has no such key."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def is_type_of(section: type[BaseModel], value: Any) -> bool:
    """Return whether this `type` chooses the section; an import path chooses one that takes any text."""
    return value in type_values(section) or (":" in str(value) and not type_values(section))


def sections_at(kind: type[BaseModel], path: Iterable[str]) -> list[type[BaseModel]]:
    """Return the section types that a path of keys may hold, each once; positions in lists do not matter."""
    sections = [kind]
    for part in path:
        if not part.isdecimal():
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [child for field in fields for child in sections_in(field.annotation)]
    return list(dict.fromkeys(sections))
