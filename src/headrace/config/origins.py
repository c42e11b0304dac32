"""Where each value of a merged configuration was written: in which file, or on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

COMMAND_LINE = "command line"


class Origins:
    """By dotted key, the last source that set it."""

    def __init__(self, everything: str) -> None:
        self._everything = everything
        """What is named for keys that no source set: all files, or the command line."""
        self._source_of: dict[str, Path | str] = {}

    def record(self, keys: Iterable[str], source: Path | str) -> None:
        for key in keys:
            self._source_of.pop(key, None)  # the newest stand last
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
