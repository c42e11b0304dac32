"""Base of every section of a run file, the types behind its annotations, and short forms of its keys."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Tag, model_validator

from headrace.errors import BadInput, InvalidValue, shown_value

Tree = dict[str, Any]
"""A run file as plain tables, lists and values."""
COMMAND_LINE = "command line"
IMPORTED = "imported"
"""The tag of the alternative that is named by an import path, `package.module:Class`."""


class Origins:
    """The last source that set each dotted key: a file, or the command line."""

    def __init__(self, everything: str) -> None:
        self._everything = everything
        """The source of keys that are not recorded: all files, or the command line."""
        self._source_of: dict[str, Path | str] = {}

    def record(self, keys: Iterable[str], source: Path | str) -> None:
        for key in keys:
            self._source_of.pop(key, None)  # keeps the newest last
            self._source_of[key] = source

    def of(self, key: str) -> Path | str:
        """Return the source of a key: its own, else that of the table or list around it, else of a key inside it."""
        parts = key.split(".")
        around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        inside = (name for name in reversed(self._source_of) if name.startswith(f"{key}."))
        for name in (*around, *inside):
            if name in self._source_of:
                return self._source_of[name]
        return self._everything


class ConfigError(BadInput):
    """An invalid configuration; print its message and stop."""


class Config(BaseModel):
    """Base of every section: unknown keys are errors, values are checked when they are set."""

    PATHS_OF_FILE: ClassVar[tuple[str, ...]] = ()
    """Dotted keys that hold a path, or a list of them, relative to the file they are written in."""
    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of dotted keys of which one is given: a later source that gives one replaces what earlier ones chose."""
    TEXT_FOR: ClassVar[dict[str, str]] = {}
    """Dotted keys of tables that a text may stand for, each with the key of the table that the text sets."""
    FILLED_FROM: ClassVar[dict[str, str]] = {}
    """Dotted keys that take another key's value where they have none of their own."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # a field may take alternatives that are registered later
        ser_json_inf_nan="constants",  # TOML has them, and tables of the user may
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, table: Any) -> Any:
        """Refuse booleans for numbers: pydantic reads `--key` without a value, which is true, as 1."""
        if not isinstance(table, dict):
            return table
        flags = [key for key, value in table.items() if isinstance(value, bool) and key in cls.model_fields]
        kinds = {key: kinds_of(cls.model_fields[key].annotation) for key in flags}
        wrong = [key for key in flags if {int, float} & kinds[key] and not {bool, Any} & kinds[key]]
        return {**table, **{key: BooleanForNumber(table[key]) for key in wrong}}

    @classmethod
    def alternatives(cls) -> list[type[BaseModel]]:
        """Return the sections that a field of this type takes: this one, unless a `type` chooses between several."""
        return [cls]

    @classmethod
    def translated(cls, tree: Tree, files: Sequence[Path], origins: Origins) -> tuple[Tree, list[str]]:
        """Translate a merged tree that is written in another form into one of this type; return it with notices."""
        return tree, []

    def problems(self) -> Iterator[InvalidValue]:
        """Yield what is wrong with the values of several keys together; the first problem is reported."""
        return iter(())

    def invalid(self, key: str, fact: str, fix: str | None = None) -> InvalidValue:
        """Return a problem of the value at a dotted key of this section."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return InvalidValue(fact, key=key, value=value, fix=fix)

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        for problem in self.problems():
            raise problem
        return self

    def notices(self) -> list[str]:
        """Return notices about a configuration that is valid but probably not intended."""
        return []


class BooleanForNumber(NamedTuple):
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


def sections_at(kind: type[BaseModel], path: Iterable[str]) -> list[type[BaseModel]]:
    """Return the section types that a path of keys may hold, each once; positions in lists do not matter."""
    sections = [kind]
    for part in path:
        if not part.isdecimal():
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [child for field in fields for child in sections_in(field.annotation)]
    return list(dict.fromkeys(sections))


def as_table(value: Any, key: str, plain: type | tuple[type, ...] = str) -> Any:
    """Return the table that a plain value stands for: `"max_rl"` as `{type = "max_rl"}`."""
    return {key: value} if isinstance(value, plain) and not isinstance(value, bool) else value


def rename_key(table: dict[str, Any], other: str, name: str, within: str = "") -> dict[str, Any]:
    """Return the table with the key `other` renamed to `name`."""
    rest = {key: value for key, value in table.items() if key != other}
    moved = table[other]
    return {**rest, name: merge_names(rest.get(name, moved), moved, f"{within}{name}", f"{within}{other}")}


def merge_names(explicit: Any, renamed: Any, name: str, other: str) -> Any:
    """Merge the values of a key `name` and of its other name `other`; raise if they differ.

    An empty `name` is the section itself.
    """
    explicit, renamed = _expand_like(explicit, renamed), _expand_like(renamed, explicit)
    if isinstance(explicit, dict) and isinstance(renamed, dict):
        both = {
            key: merge_names(explicit[key], value, f"{name}.{key}".removeprefix("."), f"{other}.{key}")
            for key, value in renamed.items()
            if key in explicit
        }
        return {**explicit, **renamed, **both}
    if isinstance(explicit, list) and isinstance(renamed, list) and len(explicit) == len(renamed):
        return [merge_names(*pair, name, other) for pair in zip(explicit, renamed, strict=True)]
    one, two = (value if isinstance(value, list) else [value] for value in (explicit, renamed))
    if one != two:
        fact = f"another name of {name}, which is {shown_value(explicit)}"
        fix = "Give one of them, or the same value twice."
        raise InvalidValue(fact, key=other, value=renamed, fix=fix)
    return explicit


def _expand_like(value: Any, other: Any) -> Any:
    """Write a plain value as a table where the other one is a table that such a value may stand for."""
    short = next((key for key in ("type", "import_path", "alpha") if isinstance(other, dict) and key in other), None)
    return value if short is None else as_table(value, short, (str, int, float))
