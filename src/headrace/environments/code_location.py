"""Which line of code to name when an episode fails or holds its process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

Frame = tuple[str, int]
"""A file and a line of it."""

_HELD = re.compile(r'File "(.+)", line (\d+)')


def place_of(frames: Sequence[Frame], folder: str) -> str:
    """`frames` come innermost first: the first of them in the environment's own folder, else the first of all."""
    if not frames:
        return ""
    file, line = next((frame for frame in frames if _is_own(frame[0], folder)), frames[0])
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def held_place(trace: str, folder: str) -> str:
    """Where a process was that faulthandler was told to interrupt; its main thread is the last one written."""
    dumped = trace.rpartition("most recent call first")[2]
    return place_of([(file, int(line)) for file, line in _HELD.findall(dumped)], folder)


def waits_in_loop(trace: str) -> bool:
    """Whether that process was doing nothing but wait, in its event loop."""
    innermost = [Path(file) for file, _ in _HELD.findall(trace.rpartition("most recent call first")[2])[:2]]
    return [path.name for path in innermost] == ["selectors.py", "base_events.py"]


def _is_own(file: str, folder: str) -> bool:
    path = Path(file)
    return bool(folder) and path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts
