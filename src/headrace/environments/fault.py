"""Exceptions of users' code as texts that can be sent, logged and recorded, and the line of code to report.

The text of an exception may be invalid Unicode, and its `__str__` may raise.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.safe_text import encodable

MAX_FRAMES = 30
"""The innermost frames of a traceback that are kept; a runaway recursion has thousands."""
CANCELLED_ITSELF = "CancelledError: the environment cancelled its own episode"

FileLine = tuple[str, int]
_DUMPED_FRAME = re.compile(r'File "(.+)", line (\d+)')


class Fault(msgspec.Struct, frozen=True):
    """An exception as texts; `place` is its type, file and line, so that each place is reported once."""

    kind: str
    message: str
    place: str
    traceback: str

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.message}"


def fault_of(error: BaseException) -> Fault:
    """Return an exception as texts, which can be sent even if its own text is invalid Unicode."""
    summary = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
    kind = encodable(type(error).__name__)
    where = f" {summary.stack[-1].filename}:{summary.stack[-1].lineno}" if summary.stack else ""
    return Fault(kind, encodable(str(summary)), encodable(f"{kind}{where}"), encodable("".join(summary.format())))


def user_code_location(frames: Sequence[FileLine], folder: str) -> str:
    """Return `file:line` of the first frame in the environment's folder, else of the first frame.

    `frames` come innermost first; installed packages inside the folder are skipped.
    """
    if not frames:
        return ""

    def is_own(path: Path) -> bool:
        return bool(folder) and path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts

    file, line = next((frame for frame in frames if is_own(Path(frame[0]))), frames[0])
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def dumped_code_location(dump: str, folder: str) -> str:
    """Return `user_code_location` of the main thread in a faulthandler dump."""
    return user_code_location(_main_thread_frames(dump), folder)


def is_idle_in_event_loop(dump: str) -> bool:
    """Return whether the main thread of a faulthandler dump was waiting in its event loop."""
    names = [Path(file).name for file, _ in _main_thread_frames(dump)[:2]]
    return names == ["selectors.py", "base_events.py"]


def _main_thread_frames(dump: str) -> list[FileLine]:
    main_thread = dump.rpartition("most recent call first")[2]  # faulthandler writes the main thread last
    return [(file, int(line)) for file, line in _DUMPED_FRAME.findall(main_thread)]
