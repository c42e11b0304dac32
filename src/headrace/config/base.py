"""Reading a configuration: files merged left to right, overrides on top, every problem named at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.config.habits import OTHER_NAMES, fold_habits
from headrace.errors import BadInput

Tree = dict[str, Any]
T = TypeVar("T", bound="Config")


class ConfigError(BadInput):
    """The configuration cannot be used. The message is complete: print it and stop."""


class Config(BaseModel):
    """Base of every section: unknown keys are errors, values are checked when they are set."""

    PATHS_OF_FILE: ClassVar[tuple[str, ...]] = ()
    """Dotted keys that hold a path relative to the file they are written in."""
    FILLED_FROM: ClassVar[dict[str, str]] = {}
    """Dotted keys that take another key's value where they have none of their own."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)


def load(kind: type[T], files: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[T, list[str]]:
    """Read `files` left to right, apply `--key value` overrides, validate. Returns the tree and notices to show."""
    tree: Tree = {}
    for file in files:
        content = read_toml(file)
        anchor_paths(content, kind.PATHS_OF_FILE, file.parent)
        merge(tree, content)
    for path, value in parse_overrides(overrides):
        put(tree, path, value)
    return validate(kind, tree, " + ".join(str(file) for file in files) or "command line")


def validate(kind: type[T], tree: Tree, where: str) -> tuple[T, list[str]]:
    """Check a plain tree against its type."""
    notices = fold_habits(tree)
    try:
        return kind.model_validate(tree), notices
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in _problems(kind, error))) from error


def dump(config: Config) -> str:
    """The whole tree as TOML. Loading it gives the same tree, and dumping that the same text."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def read_toml(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def anchor_paths(tree: Tree, keys: Iterable[str], directory: Path) -> None:
    """Make relative paths in a file mean the same from every working directory."""
    for key in keys:
        *parents, name = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict) and isinstance(node.get(name), str):
            node[name] = str((directory / node[name]).resolve())


def merge(base: Tree, update: Tree) -> None:
    """Tables merge key by key; any other value, lists included, is replaced."""
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def parse_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Any]]:
    """`--trainer.optim.lr 1e-5` or `--trainer.optim.lr=1e-5`; a key without a value is true."""
    result: list[tuple[list[str], Any]] = []
    pending = list(arguments)
    while pending:
        key = pending.pop(0)
        if not key.startswith("--") or len(key) < 3:
            raise ConfigError(f"unexpected argument {key!r}: overrides are written --section.key value")
        name, separator, text = key[2:].partition("=")
        if not separator and pending and not pending[0].startswith("--"):
            text, separator = pending.pop(0), "="
        result.append((name.replace("-", "_").split("."), parse_value(text) if separator else True))
    return result


def parse_value(text: str) -> Any:
    """A TOML value where it is one (numbers, booleans, lists, quoted strings), else the text itself."""
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
                raise ConfigError(f"--{'.'.join(path)}: {name} is a list of {len(node)}; give an index below that")
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
        else:
            raise ConfigError(f"--{'.'.join(path)}: {'.'.join(path[:depth])} is a value, not a section")
        if last:
            node[index] = value
        else:
            node = node[index] if isinstance(node, list) else node.setdefault(index, {})


def _problems(kind: type[Config], error: ValidationError) -> list[str]:
    """Every problem once, under the key that the user wrote."""
    found: dict[tuple[str, str], str] = {}
    for problem in error.errors():
        location = _written_key(kind, problem)
        name = ".".join(str(part) for part in location)
        origins = [f"{s}{name.removeprefix(t)}" for t, s in kind.FILLED_FROM.items() if f"{name}.".startswith(f"{t}.")]
        if not any((origin, problem["type"]) in found for origin in origins):
            found[name, problem["type"]] = _explain(kind, problem, location)
    return list(found.values())


def _written_key(kind: type[BaseModel], problem: Any) -> list[Any]:
    """The location without what pydantic adds for unions: their tags and the names of their types."""
    *parents, last = problem["loc"] or [None]
    unknown = problem["type"] == "extra_forbidden"
    names = {part for path in _paths(kind) for part in path}
    return [p for p in parents if isinstance(p, int) or p in names] + ([last] if unknown or last in names else [])


def _explain(kind: type[BaseModel], problem: Any, location: list[Any]) -> str:
    """One validation problem in words that name the key and, for an unknown one, the nearest known."""
    name = ".".join(str(part) for part in location) or "configuration"
    if problem["type"] == "extra_forbidden":
        close = _nearest(kind, location)
        return f"{name}: unknown key." + (f" Did you mean {close}?" if close else "")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {message}" if location else message
    return f"{name}: {message} (got {problem['input']!r})"


def _nearest(kind: type[BaseModel], location: list[Any]) -> str | None:
    """The known key closest to the last part, first among its siblings, then anywhere in the tree."""
    siblings = _fields_at(kind, [part for part in location[:-1] if isinstance(part, str)])
    wrong = str(location[-1])
    ours = OTHER_NAMES.get(wrong)
    match = [ours] if ours in siblings else difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.6)
    prefix = ".".join(str(part) for part in location[:-1])
    if match:
        return f"{prefix}.{match[0]}" if prefix else match[0]
    everywhere = [".".join(path) for path in _paths(kind)]
    exact = [path for path in everywhere if path.split(".")[-1] in (wrong, ours)]
    return exact[0] if exact else None


def _fields_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    sections = [kind]
    for part in path:
        sections = [
            child for section in sections if part in section.model_fields for child in sections_of(section, part)
        ]
    return [name for section in sections for name in section.model_fields]


def _paths(kind: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for name in kind.model_fields:
        yield (*prefix, name)
        for child in sections_of(kind, name):
            yield from _paths(child, (*prefix, name))


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
