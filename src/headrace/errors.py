"""Errors whose message the command line prints without a traceback."""

from __future__ import annotations

import difflib
import json
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.safe_text import escape_line

AGAIN = os.EX_TEMPFAIL
"""Exit status (75) of a process that may succeed if it is restarted: the engine under a server died."""

RESTART_RUN = os.EX_IOERR
"""Exit status (74) of a process that set a damaged file aside: the run continues if all processes are restarted."""

FENCED = os.EX_PROTOCOL
"""Exit status (76) of a process that another one has replaced while it was paused or cut off."""

SAVED = 128 + signal.SIGUSR1
"""Exit status (138) of a trainer, and of a run, that SIGUSR1 stopped: the last step has a checkpoint."""

BAD_INPUT = 2
"""Exit status of a command with invalid input."""

LONGEST_VALUE = 100
"""Characters of a value that a message shows."""


class Failure(Exception):
    """An error at run time. The message has the cause and a fix."""


class Repaired(Failure):
    """A damaged file was set aside. The run continues without it once all of its processes are started again."""


class Fenced(Failure):
    """Another process has replaced this one while it was paused or cut off: the file system has refused a write."""


class BadInput(Failure):
    """Invalid input of the user; nothing has been started or changed.

    The message is made of the fields, as `file:line: key = value: fact. Fix`, without those that are not set.
    Tests assert on the fields, so that wording stays free to improve.
    """

    def __init__(
        self,
        fact: str,
        *,
        key: str | None = None,
        value: Any = None,
        fix: str | None = None,
        file: Path | str | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(fact)
        self.fact = fact
        """What is wrong with the value, or with the file."""
        self.key = key
        """The key, option or argument as the user wrote it: `trainer.optim.lr`, `--trainer.optim.lr`, `MODEL`."""
        self.value = value
        """The invalid value; None: no value is shown."""
        self.fix = fix
        """A sentence with the fix."""
        self.file = file
        """The invalid file, or the one that has the key."""
        self.line = line
        """The line in it, from 1."""
        self.problems: tuple[BadInput, ...] = (self,)
        """All problems that are reported together, by default only this one."""

    @classmethod
    def combine(cls, problems: Sequence[BadInput]) -> Self:
        """Combine several errors into one with the fields of the first."""
        first = problems[0]
        error = cls(first.fact, key=first.key, value=first.value, fix=first.fix, file=first.file, line=first.line)
        if len(problems) > 1:
            error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        if len(self.problems) > 1:
            return "\n".join(str(problem) for problem in self.problems)
        file = escape_line(str(self.file))
        place = "" if self.file is None else f"{file}: " if self.line is None else f"{file}:{self.line}: "
        shown = "" if self.value is None else shown_value(self.value)
        what = f"{self.key} = {shown}" if self.key and shown else self.key or shown
        fact = self.fact if self.fix is None else f"{self.fact.rstrip('.')}. {self.fix}"
        return f"{place}{what}: {fact}" if what else f"{place}{fact}"


class InvalidValue(BadInput, ValueError):
    """An error of a validator of the configuration; `key` is relative to the validator's section."""


class DataError(BadInput):
    """Invalid data: `file` is the file or the dataset, `line` the line or row in it, `key` the column."""


def suggest_similar(name: str, names: Collection[str], also: str = "", *, prefix: str = "") -> str:
    """Return a fix for an unknown name: the most similar of `names`, if any is similar, then the sentence `also`."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {prefix}{close[0]}? {also}".rstrip() if close else also


def shown_value(value: Any) -> str:
    """Return a value as a run file would write it, cut to `LONGEST_VALUE` characters."""
    if isinstance(value, Path):
        return escape_line(str(value))
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
