"""Reading a configuration: files merged left to right, overrides on top, every problem named at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headrace.config.habits import fold_habits
from headrace.config.problems import NoNumber, explain_all, kinds_of
from headrace.config.yaml_text import parse_yaml
from headrace.errors import BadInput

Tree = dict[str, Any]
T = TypeVar("T", bound="Config")


class ConfigError(BadInput):
    """The configuration cannot be used. The message is complete: print it and stop."""


class Config(BaseModel):
    """Base of every section: unknown keys are errors, values are checked when they are set."""

    PATHS_OF_FILE: ClassVar[tuple[str, ...]] = ()
    """Dotted keys that hold a path, or a list of them, relative to the file they are written in."""
    FILLED_FROM: ClassVar[dict[str, str]] = {}
    """Dotted keys that take another key's value where they have none of their own."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # tables of the user's own may have them, and TOML knows them
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """To pydantic it is 1, so that a key whose value was forgotten would quietly have one."""
        if not isinstance(given, dict):
            return given
        flags = [key for key, value in given.items() if isinstance(value, bool) and key in cls.model_fields]
        kinds = {key: kinds_of(cls.model_fields[key].annotation) for key in flags}
        wrong = [key for key in flags if {int, float} & kinds[key] and not {bool, Any} & kinds[key]]
        return {**given, **{key: NoNumber(given[key]) for key in wrong}}

    @classmethod
    def translated(cls, tree: Tree, files: Sequence[Path], where: str) -> tuple[Tree, list[str]]:
        """What files and overrides came to, as a tree of this type, and notices; for files in another form."""
        return tree, []

    def notices(self) -> list[str]:
        """What to tell the user about a configuration that is valid but hardly meant."""
        return []


def load(kind: type[T], files: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[T, list[str]]:
    """Read `files` left to right, apply `--key value` overrides, validate. Returns the tree and notices to show."""
    tree: Tree = {}
    for file in files:
        content = read_file(file)
        anchor_paths(content, kind.PATHS_OF_FILE, file.parent)
        merge(tree, content)
        drop_filled(tree, kind.FILLED_FROM)
    for path, value in parse_overrides(overrides):
        put(tree, path, value)
    anchor_paths(tree, kind.PATHS_OF_FILE, Path.cwd())  # those that were typed
    where = " + ".join(str(file) for file in files) or "command line"
    tree, notices = kind.translated(tree, files, where)
    config, more = validate(kind, tree, where)
    return config, notices + more


def validate(kind: type[T], tree: Tree, where: str) -> tuple[T, list[str]]:
    """Check a plain tree against its type."""
    notices = fold_habits(tree)
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        problems = explain_all(kind, error, kind.FILLED_FROM)
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems)) from error
    return config, notices + config.notices()


def dump(config: Config) -> str:
    """The whole tree as TOML. Loading it gives the same tree, and dumping that the same text."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def read_file(path: Path) -> Tree:
    """A run file: YAML by its name's end, else TOML."""
    if path.suffix not in (".yaml", ".yml"):
        return read_toml(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a run file is a table of keys, not {type(tree).__name__}")
    return tree


def read_toml(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def anchor_paths(tree: Tree, keys: Iterable[str], directory: Path) -> None:
    """Make relative paths in a file mean the same from every working directory."""
    for key in keys:
        *parents, name = key.split(".")
        node = value_at(tree, parents)
        given = node.get(name) if isinstance(node, dict) else None
        if isinstance(given, str):
            node[name] = str((directory / given).resolve())
        elif isinstance(given, list):
            node[name] = [str((directory / path).resolve()) if isinstance(path, str) else path for path in given]


def drop_filled(tree: Tree, filled_from: Mapping[str, str]) -> None:
    """Drop keys that say what the key says that fills them, as in a run's own file: they follow if that changes."""
    for target, source in filled_from.items():
        *parents, name = target.split(".")
        section = value_at(tree, parents)
        if isinstance(section, dict) and name in section:
            _drop_equal(section, name, value_at(tree, source.split(".")))


def _drop_equal(section: Tree, name: str, value: Any) -> None:
    given = section[name]
    if isinstance(given, dict) and isinstance(value, dict):
        for key in given.keys() & value.keys():
            _drop_equal(given, key, value[key])
    elif given == value:
        del section[name]


def value_at(tree: Any, path: Sequence[str]) -> Any:
    """What a tree has there; None where it has nothing."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


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
