"""File locks (flock), which the kernel releases when the processes that hold them end."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import BadInput
from headrace.transport.run_dir import RunDir


@contextmanager
def lock(path: Path, on_wait: Callable[[int | None], None]) -> Iterator[int]:
    """Hold the lock file, waiting for it if necessary.

    Before waiting, `on_wait` is called with the id of the process that holds the lock, None if unknown; it may raise.
    Yields the descriptor that holds the lock: processes that inherit it hold it too, until the last of them ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text()
            on_wait(int(holder) if holder.isdecimal() else None)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def only_one(run: RunDir, process: str) -> Iterator[None]:
    """Refuse a second process of this name in a run: it would overwrite the files of the first."""

    def refuse(_: int | None) -> None:
        raise BadInput(f"another {process} is running in it", key="RUN", value=run.root, fix="Stop that one first.")

    with lock(run.root / f".{process}.lock", refuse):
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file."""
    if not path.is_file():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
