"""Golden pages of what the command line prints, in `tests/snapshots/*.txt`: all wording can be reviewed in one place.

`make snapshots` rewrites the pages. A comparison ignores white space, since the width of a help text depends on the
version of Python.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "snapshots"
UPDATE_VAR = "HEADRACE_UPDATE_SNAPSHOTS"
"""Set by `make snapshots`."""


class SnapshotPage:
    """A page of titled sections. Its tests check one section each."""

    def __init__(self, name: str) -> None:
        self._path = FOLDER / f"{name}.txt"
        self._is_update = bool(os.environ.get(UPDATE_VAR))
        text = self._path.read_text() if self._path.is_file() and not self._is_update else ""
        self._sections = dict(re.findall(r"^=== (.+)\n([\s\S]*?)(?=^=== |\Z)", text, re.MULTILINE))

    @property
    def titles(self) -> set[str]:
        return set(self._sections)

    def check(self, title: str, text: str, replaced: dict[str, str] | None = None) -> None:
        """Compare a section, in which each path of `replaced` is replaced by its name; an update records it instead."""
        for path, name in (replaced or {}).items():
            text = text.replace(path, name)
        if self._is_update:
            self._sections[title] = f"{text.rstrip()}\n\n"
        assert text.split() == self._sections.get(title, "").split(), f"{title}: see `make snapshots`"

    def close(self) -> None:
        """Write the page if this is an update."""
        if self._is_update:
            self._path.write_text("".join(f"=== {title}\n{text}" for title, text in self._sections.items()))
