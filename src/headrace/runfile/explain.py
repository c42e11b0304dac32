"""`headrace config --explain KEY`: the type, the default and the description of a key of a run file.

Types and defaults are read from the fields of the sections. The description is the text under the field in the source,
else the docstring of the section that the key holds.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.base import ConfigError, sections_at, sections_in, type_values
from headrace.runfile.foreign_keys import HINTS, OTHER_NAMES

TYPE_SENTENCE = "Which kind of section this is: it decides what other keys there are."
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "anything",
    types.NoneType: "unset",
}


class Explanation(NamedTuple):
    """The explanation of a key in one type of section; a key may differ between the types of its section."""

    kinds: tuple[str, ...]
    """The types of section that have this key, where there is a choice."""
    type: str
    default: str
    sentence: str


class _Field(NamedTuple):
    section: type[BaseModel]
    name: str

    @property
    def info(self) -> FieldInfo:
        return self.section.model_fields[self.name]


def explain(root: type[BaseModel], key: str) -> list[Explanation]:
    """Explain a dotted key; return several entries where it differs by the `type` of its section."""
    fields = find(root, key)
    if not fields:
        raise ConfigError("unknown key", key=key, fix=suggest_key(key, nearest(root, key)))
    section, _, name = key.rpartition(".")
    if name == "type":
        kinds = dict.fromkeys(kind for field in fields for kind in _kinds(field.section))
        defaults = [_default(holder.info) for holder in find(root, section) if not holder.info.is_required()]
        chosen = sorted({value_words(default.type) for default in defaults if hasattr(default, "type")})
        default = " or ".join(chosen) or "none: it must be set with the section"
        return [Explanation((), _or([value_words(kind) for kind in kinds]), default, TYPE_SENTENCE)]
    if _without_positions(key)[-1] != fields[0].name:  # a key in a table whose keys the user chooses
        table = fields[0].info.annotation
        value = words_of(get_args(table)[1]) if get_origin(table) is dict else "anything"
        return [Explanation((), value, "unset", f"A name of your own. {sentence(fields[0])}")]
    merged: dict[Explanation, list[str]] = {}
    for field in fields:
        kind = _within(words_of(field.info.annotation), field.info.metadata)
        entry = Explanation((), kind, default_words(field.info), sentence(field))
        merged.setdefault(entry, []).extend(_kinds(field.section))
    return [entry._replace(kinds=tuple(dict.fromkeys(kinds))) for entry, kinds in merged.items()]


def kinds_of(root: type[BaseModel], key: str) -> dict[str, str]:
    """Return the types of section that a key may hold, each with its description."""
    sections = sections_at(root, key.split("."))
    return {kind: _one_line(section.__doc__ or "") for section in sections for kind in _kinds(section)}


def summary_of(root: type[BaseModel], key: str) -> str:
    """Return the first sentence of a key's description, without its full stop."""
    return re.split(r"(?<=\.)\s", explain(root, key)[0].sentence)[0].rstrip(".")


def find(root: type[BaseModel], key: str) -> list[_Field]:
    """Return the fields that a dotted key may be. Numbers step into lists; a table of free keys takes any name."""
    sections: list[type[BaseModel]] = [root]
    matches: list[_Field] = []
    free = False
    for part in key.split("."):
        if matches and part.isdecimal():
            continue
        fields = [_Field(section, part) for section in sections if part in section.model_fields]
        if fields:
            matches, free = fields, any(_has_free_keys(field.info.annotation) for field in fields)
            sections = [section for field in fields for section in sections_in(field.info.annotation)]
        elif free:
            free = not sections  # the part is a name chosen by the user, perhaps with a section under it
        else:
            return []
    return matches


def nearest(root: type[BaseModel], key: str, siblings: Collection[str] | None = None) -> str | None:
    """Return the key that is most similar to an unknown one, or None.

    Candidates are its siblings first, then keys with the same last part. Without `siblings`, these are the keys of
    every type of its section, and all keys are the last candidates.
    """
    parents, _, wrong = key.rpartition(".")
    ours = OTHER_NAMES.get(wrong, wrong)
    everywhere = list(keys(root))
    any_type = siblings is None
    if siblings is None:
        parents = ".".join(_without_positions(parents))
        siblings = {path.rpartition(".")[2] for path in everywhere if path.rpartition(".")[0] == parents}
    if close := [ours] if ours in siblings else difflib.get_close_matches(wrong, siblings, n=1):
        return f"{parents}.{close[0]}".removeprefix(".")
    if same := [path for path in everywhere if path.split(".")[-1] == ours]:
        return max(same, key=lambda path: difflib.SequenceMatcher(None, key, path).ratio())
    return next(iter(difflib.get_close_matches(key, everywhere, n=1)), None) if any_type else None


def suggest_key(key: str, close: str | None) -> str | None:
    """Return the fix for an unknown key: the hint for its last part, else the similar key."""
    return HINTS.get(key.rpartition(".")[2]) or (f"Did you mean {close}?" if close else None)


def _without_positions(key: str) -> list[str]:
    return [part for part in key.split(".") if not part.isdecimal()]


def keys(root: type[BaseModel]) -> Iterator[str]:
    """Yield every dotted key of a section once, in order, a section before its keys."""

    def walk(sections: Sequence[type[BaseModel]], prefix: str) -> Iterator[str]:
        for name in dict.fromkeys(name for section in sections for name in section.model_fields):
            yield prefix + name
            fields = [section.model_fields[name] for section in sections if name in section.model_fields]
            yield from walk([inner for field in fields for inner in sections_in(field.annotation)], f"{prefix}{name}.")

    yield from dict.fromkeys(walk([root], ""))


def children(root: type[BaseModel], key: str) -> list[str]:
    """Return the keys directly under a key."""
    sections = sections_at(root, key.split("."))
    return list(dict.fromkeys(f"{key}.{name}" for section in sections for name in section.model_fields))


def values_at(tree: Any, key: str) -> list[tuple[str, Any]]:
    """Return the values of a resolved tree at a key, one per member of the lists on its path; None where unset."""

    def walk(node: Any, parts: Sequence[str], path: list[str]) -> Iterator[tuple[str, Any]]:
        if not parts:
            yield ".".join(path), node
        elif isinstance(node, list) and not parts[0].isdecimal():
            for index, item in enumerate(node):
                yield from walk(item, parts, [*path, str(index)])
        else:
            if isinstance(node, list):
                inner = node[int(parts[0])] if int(parts[0]) < len(node) else None
            else:
                inner = node.get(parts[0]) if isinstance(node, Mapping) else None
            yield from walk(inner, parts[1:], [*path, parts[0]])

    return list(walk(tree, key.split("."), []))


def sentence(field: _Field) -> str:
    """Return one line: the text under a field in the source, else the docstring of the section that it holds."""
    owners = [kind for kind in field.section.__mro__ if issubclass(kind, BaseModel) and kind is not BaseModel]
    for owner in owners:
        if text := _texts(owner).get(field.name):
            return _one_line(text)
    docstrings = (_one_line(inner.__doc__) for inner in sections_in(field.info.annotation) if inner.__doc__)
    return next(docstrings, "")


@cache
def _texts(section: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field of a class in its source; nothing for a class that was made at run time."""
    classes = ast.parse(inspect.getsource(sys.modules[section.__module__])).body
    body = next((c.body for c in classes if isinstance(c, ast.ClassDef) and c.name == section.__name__), [])
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


def words_of(annotation: Any) -> str:
    """Describe a type."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Annotated:
        return _within(words_of(inside[0]), inside[1:])
    if origin is Literal:
        return _or([value_words(value.value if isinstance(value, Enum) else value) for value in inside])
    if origin in (Union, types.UnionType):
        return _union(inside)
    if origin is tuple:
        return f"list of {len(inside)} {_plural(words_of(inside[0]))}"
    if origin in (list, Sequence):
        return f"list of {_plural(words_of(inside[0]))}"
    if origin is dict and inside[1] is not Any:
        return f"table of {_plural(words_of(inside[1]))}"
    return "table"


def _plural(words: str) -> str:
    return re.sub(r"^(table|text|path|number|whole number)\b", r"\1s", words)


def _union(members: Sequence[Any]) -> str:
    """Describe a union: all its sections as one table with their types, "unset" last."""
    sections = [section for member in members for section in sections_in(member)]
    kinds = list(dict.fromkeys(kind for section in sections for kind in _kinds(section)))
    table = [f"table of type {_or(kinds)}"] if kinds else ["table"] if sections else []
    lists = any(get_origin(member) is list for member in members)
    others = [
        words_of(member) for member in members if (lists or not sections_in(member)) and member is not types.NoneType
    ]
    words = _or([*others, *([] if lists else table)])
    return f"{words}{',' if ' or ' in words else ''} or unset" if types.NoneType in members else words


def _or(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]


def _within(words: str, metadata: Sequence[Any]) -> str:
    """Add the limits of a value to the description of its type."""
    entries = [inner for entry in metadata for inner in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = [
        f"{limit} {getattr(entry, name):g}"
        for entry in entries
        for name, limit in LIMITS.items()
        if isinstance(getattr(entry, name, None), int | float)
    ]
    if not limits:
        return words
    value, unset, rest = words.partition(" or unset")
    return f"{value}, {' and '.join(limits)}{',' if unset else ''}{unset}{rest}"


def default_words(field: FieldInfo) -> str:
    """Describe the default of a field."""
    if field.is_required():
        return "none: it must be set"
    default = _default(field)
    if isinstance(default, BaseModel):
        kind = getattr(default, "type", None)
        return f'the defaults of its keys, type = "{kind}"' if kind else "the defaults of its keys"
    return value_words(default)


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def value_words(value: Any) -> str:
    """Return a value as a run file writes it."""
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        kind = {"type": value.type} if hasattr(value, "type") else {}
        changed = value.model_dump(mode="json", exclude_defaults=True)
        value = {**kind, **changed} or value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {value_words(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_words, value))}]"
    if isinstance(value, bool | str | Path):
        return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{value}"


def _kinds(section: type[BaseModel]) -> list[str]:
    """Return the values of `type` that choose a section."""
    return [str(value) for value in type_values(section)] or ["package.module:Class"] * ("type" in section.model_fields)


def _has_free_keys(annotation: Any) -> bool:
    """Return whether the annotation allows a table whose keys the user chooses."""
    return get_origin(annotation) is dict or any(_has_free_keys(inner) for inner in get_args(annotation))
