"""`headrace config --explain KEY`: what a key of a run file takes, what it is when nobody sets it, and what it is for.

Everything is read off the models of this room: types and defaults from their fields, sentences from the text under a
field in the source, and else from the section that the key holds.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.annotations import sections_in
from headrace.config.base import ConfigError
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
    """A key in one section. A union of sections may have several that differ."""

    kinds: tuple[str, ...]
    """The types of section that it is a key of, where there is a choice."""
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
    """What there is to say about a dotted key; several entries where it differs by the `type` of its section."""
    fields = find(root, key)
    if not fields:
        close = nearest(root, key)
        fix = HINTS.get(key.rpartition(".")[2]) or (f"Did you mean {close}?" if close else None)
        raise ConfigError("unknown key", key=key, fix=fix)
    if key.rpartition(".")[2] == "type":
        return [_explain_type(fields, find(root, key.rpartition(".")[0]))]
    if _plain(key.split("."))[-1] != fields[0].name:
        return [_explain_free(fields[0])]
    merged: dict[Explanation, list[str]] = {}
    for field in fields:
        entry = Explanation((), type_words(field.info), default_words(field.info), sentence(field))
        merged.setdefault(entry, []).extend(_kind(field.section))
    return [entry._replace(kinds=tuple(dict.fromkeys(kinds))) for entry, kinds in merged.items()]


def _explain_free(field: _Field) -> Explanation:
    """A name of the user's own, in a table that takes any."""
    table = field.info.annotation
    value = words_of(get_args(table)[1]) if get_origin(table) is dict else "anything"
    return Explanation((), value, "unset", f"A name of your own. {sentence(field)}")


def _explain_type(fields: Sequence[_Field], holders: Sequence[_Field]) -> Explanation:
    """All kinds of a section at once; the default is that of the section which has the key."""
    known = dict.fromkeys(kind for field in fields for kind in _kind(field.section))
    defaults = [_default(holder.info) for holder in holders if not holder.info.is_required()]
    chosen = {value_words(default.type) for default in defaults if hasattr(default, "type")}
    default = " or ".join(sorted(chosen)) or "none: it must be set with the section"
    return Explanation((), _or([value_words(kind) for kind in known]), default, TYPE_SENTENCE)


def kinds_of(root: type[BaseModel], key: str) -> dict[str, str]:
    """The types of section that a key may hold, each with a sentence."""
    sections = sections_at(root, key)
    return {kind: _one_line(section.__doc__ or "") for section in sections for kind in _kind(section)}


def summary_of(root: type[BaseModel], key: str) -> str:
    """The first sentence about a key, for a list of them."""
    return re.split(r"(?<=\.)\s", explain(root, key)[0].sentence)[0].rstrip(".")


def find(root: type[BaseModel], key: str) -> list[_Field]:
    """The fields that a dotted key may be. Numbers step into lists, and a table of free keys takes any."""
    sections: list[type[BaseModel]] = [root]
    found: list[_Field] = []
    free = False
    for part in key.split("."):
        if found and part.isdecimal():
            continue
        fields = [_Field(section, part) for section in sections if part in section.model_fields]
        if fields:
            found, free = fields, any(_is_free(field.info.annotation) for field in fields)
            sections = [section for field in fields for section in sections_in(field.info.annotation)]
        elif free:
            free = not sections  # a name of the user's own stands here, and perhaps a section under it
        else:
            return []
    return found


def nearest(root: type[BaseModel], key: str) -> str | None:
    """The known key closest to one that is not: beside it first, then by its last part anywhere, then by all of it."""
    *parents, wrong = key.split(".")
    ours = OTHER_NAMES.get(wrong, wrong)
    everywhere = list(keys(root))
    beside = {path.split(".")[-1]: path for path in everywhere if path.split(".")[:-1] == _plain(parents)}
    if close := [ours] if ours in beside else difflib.get_close_matches(wrong, beside, n=1, cutoff=0.6):
        return beside[close[0]]
    if same := [path for path in everywhere if path.split(".")[-1] == ours]:
        return max(same, key=lambda path: difflib.SequenceMatcher(None, key, path).ratio())
    return next(iter(difflib.get_close_matches(key, everywhere, n=1, cutoff=0.6)), None)


def _plain(parents: Sequence[str]) -> list[str]:
    return [part for part in parents if not part.isdecimal()]


def keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key under a section, in order, each once, sections before what is in them."""
    yield from dict.fromkeys(_keys([root], prefix))


def _keys(sections: Sequence[type[BaseModel]], prefix: str) -> Iterator[str]:
    for name in dict.fromkeys(name for section in sections for name in section.model_fields):
        yield prefix + name
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        yield from _keys([inner for field in fields for inner in sections_in(field.annotation)], f"{prefix}{name}.")


def children(root: type[BaseModel], key: str) -> list[str]:
    """The keys right under one."""
    return list(dict.fromkeys(f"{key}.{name}" for section in sections_at(root, key) for name in section.model_fields))


def sections_at(root: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The sections that a key may hold, each once."""
    found = [section for field in find(root, key) for section in sections_in(field.info.annotation)]
    return list(dict.fromkeys(found))


def values_at(tree: Any, key: str) -> list[tuple[str, Any]]:
    """What a resolved tree has at a key: one entry for each member of the lists on the way; None where it is unset."""
    return list(_values(tree, key.split("."), []))


def _values(node: Any, parts: Sequence[str], path: list[str]) -> Iterator[tuple[str, Any]]:
    if not parts:
        yield ".".join(path), node
    elif isinstance(node, list) and not parts[0].isdecimal():
        for index, item in enumerate(node):
            yield from _values(item, parts, [*path, str(index)])
    elif isinstance(node, list):
        inner = node[int(parts[0])] if int(parts[0]) < len(node) else None
        yield from _values(inner, parts[1:], [*path, parts[0]])
    else:
        inner = node.get(parts[0]) if isinstance(node, Mapping) else None
        yield from _values(inner, parts[1:], [*path, parts[0]])


def sentence(field: _Field) -> str:
    """Return one line: the text under a field in the source, else the docstring of the section that it holds."""
    owners = [kind for kind in field.section.__mro__ if issubclass(kind, BaseModel) and kind is not BaseModel]
    for owner in owners:
        if text := _texts(owner).get(field.name):
            return _one_line(text)
    held = [_one_line(inner.__doc__) for inner in sections_in(field.info.annotation) if inner.__doc__]
    return held[0] if held else ""


@cache
def _texts(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a class, as its source has it; nothing of a class that was made at run time."""
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


def type_words(field: FieldInfo) -> str:
    """What a field takes, in words."""
    return _within(words_of(field.annotation), field.metadata)


def words_of(annotation: Any) -> str:
    """A type, in words."""
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
        return f"list of {len(inside)} {_several(words_of(inside[0]))}"
    if origin in (list, Sequence):
        return f"list of {_several(words_of(inside[0]))}"
    if origin is dict:
        return "table" if inside[1] is Any else f"table of {_several(words_of(inside[1]))}"
    return "table"


def _several(words: str) -> str:
    """Of a kind of value, more than one."""
    return re.sub(r"^(table|text|path|number|whole number)\b", r"\1s", words)


def _union(members: Sequence[Any]) -> str:
    """Sections are one word, with their types; not being set comes last."""
    sections = [section for member in members for section in sections_in(member)]
    kinds = list(dict.fromkeys(kind for section in sections for kind in _kind(section)))
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
    """With the limits of its value."""
    limits = [limit for entry in metadata for limit in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    found = [
        f"{told} {getattr(entry, name):g}"
        for entry in limits
        for name, told in LIMITS.items()
        if isinstance(getattr(entry, name, None), int | float)
    ]
    if not found:
        return words
    value, unset, rest = words.partition(" or unset")
    return f"{value}, {' and '.join(found)}{',' if unset else ''}{unset}{rest}"


def default_words(field: FieldInfo) -> str:
    """What it is unless somebody sets it."""
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
    """A value as a run file writes it."""
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


def _kind(section: type[BaseModel]) -> list[str]:
    """What `type` says for a section to be this one."""
    field = section.model_fields.get("type")
    if field is None:
        return []
    if get_origin(field.annotation) is Literal:
        return [str(value) for value in get_args(field.annotation)]
    return ["package.module:Class"]


def _is_free(annotation: Any) -> bool:
    """Whether a table is allowed whose keys are the user's own."""
    return get_origin(annotation) is dict or any(_is_free(inner) for inner in get_args(annotation))
