"""Files and directories that are either whole or absent, whatever is killed when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside, fsync, rename, fsync the directory: a reader sees the old file or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_directory(final: Path, fill: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `fill` write into a hidden directory beside, then put it in the place of `final`.

    `durable` fsyncs every file first: what is written must then survive a power loss, not only a kill.
    """
    draft, replaced = (final.with_name(f".{final.name}.{suffix}") for suffix in ("tmp", "old"))
    for leftover in (draft, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        fill(draft)
        for path in (*draft.rglob("*"), draft) if durable else ():
            sync(path)
        if final.exists():
            os.replace(final, replaced)
        os.replace(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
