"""Base of every section of a run file, and the error that a wrong one raises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from headrace.config.annotations import NoNumber, kinds_of
from headrace.errors import BadInput

Tree = dict[str, Any]
"""A run file as plain tables, lists and values."""


COMMAND_LINE = "command line"


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
    def _refuse_booleans_for_numbers(cls, given: Any) -> Any:
        """Refuse booleans for numbers: pydantic reads `--key` without a value, which is true, as 1."""
        if not isinstance(given, dict):
            return given
        flags = [key for key, value in given.items() if isinstance(value, bool) and key in cls.model_fields]
        kinds = {key: kinds_of(cls.model_fields[key].annotation) for key in flags}
        wrong = [key for key in flags if {int, float} & kinds[key] and not {bool, Any} & kinds[key]]
        return {**given, **{key: NoNumber(given[key]) for key in wrong}}

    @classmethod
    def alternatives(cls) -> list[type[BaseModel]]:
        """Return the sections that a field of this type takes: this one, unless a `type` chooses between several."""
        return [cls]

    @classmethod
    def translated(cls, tree: Tree, files: Sequence[Path], origins: Origins) -> tuple[Tree, list[str]]:
        """Translate a merged tree that is written in another form into one of this type; return it with notices."""
        return tree, []

    def notices(self) -> list[str]:
        """Return notices about a configuration that is valid but probably not intended."""
        return []
