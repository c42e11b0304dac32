"""Read and write run files in TOML and YAML as plain trees.

In YAML a duplicate key is an error and `1e-5` is a number. TOML has no null: the text "null" stands for it.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import yaml  # type: ignore[import-untyped]

from headrace.config.base import Config, ConfigError, Tree
from headrace.errors import BadInput
from headrace.rollout.digest import digest_of

OWN_ARGUMENTS = ("args", "kwargs")
"""Tables that are passed to the user's own code unchanged."""

YAML_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")

YAML_MERGE = "tag:yaml.org,2002:merge"

_DIGEST = re.compile(r"# xxh3-128 of the lines above: (.{32})\n\Z", re.DOTALL)
"""The last line of a configuration that a run has saved."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def compose_mapping_node(self, anchor: Any) -> Any:
        """Refuse duplicate keys, except those that `<<` merges, which may be overridden."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == YAML_MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", YAML_FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Return the plain tree of a YAML document; raise `BadInput` with the line of what is wrong."""
    try:
        tree = yaml.load(text, _Loader)  # a safe loader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        column = "" if mark is None else f" (column {mark.column + 1})"
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"not valid YAML: {words}{column}", line=None if mark is None else mark.line + 1) from error
    except yaml.YAMLError as error:
        raise BadInput(f"not valid YAML: {error}") from error
    return {} if tree is None else tree


def read_file(path: Path) -> Tree:
    """Read a run file: YAML by its suffix, else TOML, where the text "null" is read as null."""
    text = _read_text(path)
    if path.suffix not in (".yaml", ".yml"):
        tree = _texts_to_nulls(_parse_toml(text, path))
        assert isinstance(tree, dict)
        return tree
    try:
        tree = parse_yaml(text)
    except BadInput as error:
        raise ConfigError(error.fact, file=path, line=error.line) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"a run file is a table of keys, not a {type(tree).__name__}", file=path)
    return tree


def read_toml(path: Path) -> Tree:
    return _parse_toml(_read_text(path), path)


def has_digest(path: Path) -> bool:
    """Return whether a run file has a digest; raise `ConfigError` if it differs from it."""
    return _DIGEST.search(_read_text(path)) is not None


def _read_text(path: Path) -> str:
    """Return the text of a run file, which may begin with a byte order mark; raise if it differs from its digest."""
    if path.is_dir():
        own = path / "config.toml"
        fix = f"Name its file: {own}" if own.is_file() else "Name a run file in it."
        raise ConfigError("a directory, not a run file", file=path, fix=fix)
    if not path.is_file():
        key, separator, value = str(path).partition("=")
        raise ConfigError("no such file", file=path, fix=f"To set a key, write --{key} {value}" if separator else None)
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError("the text is UTF-16", file=path, fix="Save the file as UTF-8.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fact, fix = f"byte {content[error.start]:#x} is not UTF-8", "Save the file as UTF-8."
        raise ConfigError(fact, file=path, line=line, fix=fix) from error
    saved = _DIGEST.search(text)
    if saved is not None and digest_of(text[: saved.start()].encode()) != saved[1]:
        fact = "differs from what the run saved: edited, or damaged"
        fix = "Check its values, correct what is wrong, and delete its last line, the digest."
        raise ConfigError(fact, file=path, fix=fix)
    return text


def _parse_toml(text: str, path: Path) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if text.lstrip().startswith("{"):
            fix = "Write the run file as TOML, or name it .yaml: YAML reads JSON."
            raise ConfigError("JSON, not TOML", file=path, fix=fix) from error
        place = re.search(r"line (\d+)", str(error))
        raise ConfigError(f"not valid TOML: {error}", file=path, line=int(place[1]) if place else None) from error


def _texts_to_nulls(tree: Any) -> Any:
    """Read the text "null" as null, which TOML lacks; arguments for the user's own code stay as they are."""
    if isinstance(tree, dict):
        return {key: value if key in OWN_ARGUMENTS else _texts_to_nulls(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_texts_to_nulls(value) for value in tree]
    return None if tree == "null" else tree


def dump_sealed(config: Config) -> str:
    """Return the tree as TOML with a digest in its last line, a comment."""
    text = dump(config)
    return f"{text}# xxh3-128 of the lines above: {digest_of(text.encode())}\n"


def dump(config: Config) -> str:
    """Return the whole tree as TOML. Loading it results in the same tree and the same dump."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
