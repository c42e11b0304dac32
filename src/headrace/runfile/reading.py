"""Read a run file: files merged left to right, overrides on top, every problem named at once.

The errors of pydantic become `BadInput` with the whole dotted key, its source, and a similar known key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headrace.config.base import (
    COMMAND_LINE,
    BooleanForNumber,
    Config,
    ConfigError,
    Member,
    Origins,
    Tree,
    members_of,
    sections_at,
    type_values,
)
from headrace.config.files import OWN_ARGUMENTS, read_file
from headrace.errors import BadInput, InvalidValue
from headrace.runfile.explain import nearest, suggest_key
from headrace.runfile.foreign_keys import replace_foreign_keys

T = TypeVar("T", bound=Config)

EXPECTED = {
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""Facts by pydantic's error type, where pydantic's own message names Python classes."""


def load(kind: type[T], files: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[T, list[str]]:
    """Read `files` left to right, apply `--key value` overrides, validate. Returns the tree and notices to show."""
    where = " + ".join(str(file) for file in files) or COMMAND_LINE
    origins = Origins(where)
    tree: Tree = {}
    notices: list[str] = []
    for file in files:
        content = read_file(file)
        # Before the merge: what is later replaces what is earlier.
        notices += _replace_foreign_keys(content, Origins(str(file)))
        anchor_paths(content, kind.PATHS_OF_FILE, file.parent)
        for table, key in kind.TEXT_FOR.items():  # a text replaces the whole table of earlier files that it stands for
            section, name = holder_of(content, table.split("."))
            if isinstance(section.get(name), str):
                section[name] = {key: section[name]}
                drop(tree, table.split("."))
        written = leaves(content)
        drop_alternatives(kind, tree, written)
        merge(tree, content)
        for (
            target,
            source,
        ) in kind.FILLED_FROM.items():  # a key that says what fills it, as in a run's own file, follows it
            section, name = holder_of(tree, target.split("."))
            if name in section:
                _drop_equal(section, name, value_at(tree, source.split(".")))
        origins.record(written, file)
    typed = parse_overrides(overrides)
    drop_alternatives(kind, tree, {".".join(path): value for path, value in typed})
    for path, value in typed:
        if value is None:
            drop(tree, path)
        else:
            put(tree, path, value)
    anchor_paths(tree, kind.PATHS_OF_FILE, Path.cwd())  # those that were typed
    origins.record((".".join(path) for path, _ in typed), COMMAND_LINE)
    tree, translating = kind.translated(_without_nulls(tree), files, origins)
    config, more = validate(kind, tree, origins)
    return config, notices + translating + more


def validate(kind: type[T], tree: Tree, where: str | Origins) -> tuple[T, list[str]]:
    """Check a plain tree against its type; `where` its values were written is named in errors."""
    origins = Origins(where) if isinstance(where, str) else where
    notices = _replace_foreign_keys(tree, origins)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError.combine(explain_all(kind, error, kind.FILLED_FROM, origins)) from error
    return config, notices + config.notices()


def _replace_foreign_keys(tree: Tree, origins: Origins) -> list[str]:
    """Remove or move the foreign keys in `tree`; returns one notice for each."""
    try:
        return replace_foreign_keys(tree)
    except InvalidValue as error:
        raise ConfigError.combine([located(error, origins)]) from error


def _without_nulls(tree: Any) -> Any:
    """Drop the keys that a later source took back with null."""
    if isinstance(tree, list):
        return [_without_nulls(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: value if key in OWN_ARGUMENTS else _without_nulls(value)
        for key, value in tree.items()
        if value is not None or key == "renderer"  # there null is a value: no renderer
    }


def anchor_paths(tree: Tree, keys: Iterable[str], directory: Path) -> None:
    """Make relative paths in a file mean the same from every working directory."""
    for key in keys:
        node, name = holder_of(tree, key.split("."))
        value = node.get(name)
        if isinstance(value, str):
            node[name] = str((directory / value).resolve())
        elif isinstance(value, list):
            node[name] = [str((directory / path).resolve()) if isinstance(path, str) else path for path in value]


def _drop_equal(section: Tree, name: str, value: Any) -> None:
    """Drop a key with this value; of a table, the keys that have the same values."""
    present = section[name]
    if isinstance(present, dict) and isinstance(value, dict):
        for key in present.keys() & value.keys():
            _drop_equal(present, key, value[key])
    elif present == value:
        del section[name]


def drop_alternatives(kind: type[Config], tree: Tree, written: Mapping[str, Any]) -> None:
    """Drop from `tree` the choices that a later source replaces; `written` has that source's values by dotted key.

    Of a group of alternatives the ones that the source does not give go. Where it changes a table's `type`, the keys go
    that belong to other types alone.
    """
    for group in kind.ALTERNATIVES:
        chosen_keys = {key for key in group if any(f"{name}.".startswith(f"{key}.") for name in written)}
        for key in set(group) - chosen_keys if chosen_keys else ():
            drop(tree, key.split("."))
    for key, value in written.items():
        *parents, name = key.split(".")
        table = table_at(tree, *parents)
        if name == "type" and table and table.get("type") != value:
            sections = sections_at(kind, parents)
            imported = ":" in str(value)  # an import path chooses a section that takes any text as its type
            chosen = [s for s in sections if value in type_values(s) or (imported and not type_values(s))]
            own = {field for section in chosen for field in section.model_fields}
            others = {field for section in sections for field in section.model_fields} - own
            for field in others & table.keys() if own else ():
                del table[field]


def drop(tree: Tree, path: Sequence[str]) -> None:
    """Remove a dotted key, if it is there."""
    section, name = holder_of(tree, path)
    section.pop(name, None)


def holder_of(tree: Tree, path: Sequence[str]) -> tuple[Tree, str]:
    """Return the table that a key is in, an empty one where there is none, and the last part of the key."""
    return table_at(tree, *path[:-1]), path[-1]


def table_at(tree: Tree, *path: str) -> Tree:
    """Return the table at a path; an empty one where there is none."""
    table = value_at(tree, path)
    return table if isinstance(table, dict) else {}


def value_at(tree: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of a tree, None if there is none. A number steps into a list."""
    for key in path:
        if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key (`train.env.0.id`); a list without tables in it is one value."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(value, Mapping) for value in tree):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {
        path: leaf for key, value in items for path, leaf in leaves(value, f"{prefix}.{key}" if prefix else key).items()
    }


def merge(base: Tree, update: Tree) -> None:
    """Merge a tree into another: tables key by key; any other value, lists included, is replaced."""
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def parse_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Read `--trainer.optim.lr 1e-5` or `--trainer.optim.lr=1e-5`; a key without a value is true."""
    result: dict[str, Any] = {}
    pending = list(arguments)
    while pending:
        key = pending.pop(0)
        if not key.startswith("--") or len(key) < 3:
            raise ConfigError("unexpected argument", key=key, fix="Overrides are written --section.key value")
        name, separator, text = key[2:].partition("=")
        if not separator and pending and not pending[0].startswith("--"):
            text, separator = pending.pop(0), "="
        name = name.replace("-", "_")
        if name in result:
            raise ConfigError("given twice", key=f"--{name}", fix="Give it once.")
        result[name] = parse_value(text) if separator else True
    return [(name.split("."), value) for name, value in result.items()]


def parse_value(text: str) -> Any:
    """Return a TOML value where it is one (numbers, booleans, lists, quoted strings), None for null, else the text."""
    if text == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def put(tree: Tree, path: list[str], value: Any) -> None:
    """Set a dotted key; a number steps into a list of tables (`orchestrator.train.env.0.ratio`)."""
    node: Any = tree
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                name = ".".join(path[:depth])
                fact, fix = f"{name} is a list of {len(node)}", "Give an index below that."
                raise ConfigError(fact, key=f"--{'.'.join(path)}", fix=fix)
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
        else:
            raise ConfigError(f"{'.'.join(path[:depth])} is a value, not a section", key=f"--{'.'.join(path)}")
        if last:
            node[index] = value
        else:
            node = node[index] if isinstance(node, list) else node.setdefault(index, {})


def put_algorithm_keys(section: Tree, overrides: Sequence[str]) -> None:
    """Set `--algo.key value` of a command about one algorithm in its `algo` section.

    A text where further keys are set becomes a table: "policy" an empty one, another text the table's `type`.
    """
    for path, value in parse_overrides(overrides):
        if path[0] != "algo" or len(path) == 1:
            raise ConfigError("not a key of the algorithm", key=f"--{'.'.join(path)}", fix="Write --algo.key value.")
        if len(path) > 2 and isinstance(text := section.get(path[1]), str):
            section[path[1]] = {} if text == "policy" else {"type": text}
        put({"algo": section}, path, value)


def explain_all(
    kind: type[BaseModel], error: ValidationError, filled_from: Mapping[str, str], origins: Origins
) -> list[BadInput]:
    """Return every problem once; a key that `filled_from` fills does not repeat the problem of its source."""
    problems: dict[tuple[str, str], BadInput] = {}
    for details in error.errors():
        key, keys = _trace(kind, details)
        if not any((source, details["type"]) in problems for source in filled_sources(key, filled_from)):
            problems[key, details["type"]] = located(_explain(kind, details, key, keys), origins)
    return list(problems.values())


def filled_sources(key: str, filled_from: Mapping[str, str]) -> list[str]:
    """Return the keys that fill a key which is not set."""
    return [f"{s}{key.removeprefix(t)}" for t, s in filled_from.items() if f"{key}.".startswith(f"{t}.")]


def located(problem: BadInput, origins: Origins) -> BadInput:
    """Set the file in which the key is written; a key from the command line becomes an option."""
    source = origins.of(problem.key or "")
    if source != COMMAND_LINE:
        problem.file = source
    elif problem.key:
        problem.key = f"--{problem.key}"
    return problem


def _explain(kind: type[BaseModel], details: Any, key: str, keys: list[str]) -> BadInput:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValue):
        whole_key = ".".join(part for part in (key, cause.key) if part)
        return BadInput(cause.fact, key=whole_key, value=cause.value, fix=cause.fix, file=cause.file, line=cause.line)
    if details["type"] == "extra_forbidden":
        close = nearest(kind, key, keys)
        if close == ".".join(part for part in key.split(".") if not part.isdecimal()):
            return BadInput("a key of another `type`", key=key, fix=f"This one has {', '.join(keys)}.")
        return BadInput("unknown key", key=key, fix=suggest_key(key, close))
    if details["type"] == "missing":
        return BadInput("required, and not set", key=key)
    if details["type"] == "value_error":
        return BadInput(details["msg"].removeprefix("Value error, "), key=key)
    value = details["input"].given if isinstance(details["input"], BooleanForNumber) else details["input"]
    fact = EXPECTED.get(details["type"]) or details["msg"].replace("Input should be", "must be")
    fix = None
    if value is True:
        fix = f"--{key} without a value means true: give it one."
    elif details["type"] == "list_type" and isinstance(value, dict):
        value, fix = None, f"Write [[{key}]], once for each entry."
    return BadInput(fact, key=key or "configuration", value=value, fix=fix)


def _trace(kind: type[BaseModel], details: Any) -> tuple[str, list[str]]:
    """Return the dotted key of an error, and the keys of the section there.

    The location of pydantic also has tags of unions and names of types in it, which are left out.
    """
    unknown = details["type"] == "extra_forbidden"
    path: list[Any] = []
    members = [Member(kind)]
    for part in details["loc"][:-1] if unknown else details["loc"]:
        chosen = [member for member in members if part in member.tags] if len(members) > 1 else []
        inside = [inner for member in members for inner in _types_under(member.kind, part)]
        if chosen:
            members = chosen
        elif inside:
            path.append(part)
            members = [member for annotation in inside for member in members_of(annotation)]
    if unknown:
        path.append(details["loc"][-1])
    keys = [name for member in members for name in getattr(member.kind, "model_fields", ())]
    return ".".join(str(part) for part in path), keys


def _types_under(kind: Any, part: Any) -> list[Any]:
    """Return the types of the values that a key or a position leads to."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind.model_fields[part].annotation] if part in kind.model_fields else []
    if get_origin(kind) is dict and part != "[key]":
        return [get_args(kind)[1]]
    return list(get_args(kind)) if isinstance(part, int) else []
