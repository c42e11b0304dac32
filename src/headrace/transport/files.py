"""Atomic writes of files and directories: a reader sees a complete one or none, also after a kill; checked reads."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.rollout.batch import DamagedFile

MARKER = "COMPLETE.json"
"""Written last into a directory that another process waits for; a directory without it is incomplete."""
DIGITS = 8 * "[0-9]"
STEP = f"step-{DIGITS}"
"""Glob pattern of the files and directories of a step; others' names in the same place are not ours."""


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write to a temporary file, fsync, rename, fsync the directory: a reader sees the old or the new content.

    `mode` is the file mode before the umask, from the first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_directory(final: Path, fill: Callable[[Path], object], *, durable: bool = True) -> None:
    """Call `fill` on a hidden directory next to `final`, then rename it to `final`.

    `durable` fsyncs every file before, so that the content survives a power loss, not only a kill.
    """
    draft, replaced = draft_of(final), final.with_name(f".{final.name}.old")
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


def draft_of(final: Path) -> Path:
    """Return the hidden path that `write_directory` fills before the rename."""
    return final.with_name(f".{final.name}.tmp")


def link_tree(source: Path, target: Path, without: str | None = None) -> None:
    """Copy a directory whose files never change by hard links, or by content if the file system has none.

    Files of the name `without` are left out.
    """
    left_out = None if without is None else shutil.ignore_patterns(without)
    link = partial(shutil.copytree, source, copy_function=_link_or_copy, dirs_exist_ok=True, ignore=left_out)
    write_directory(target, link)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def sync(path: Path) -> None:
    """Fsync a file or a directory (its renames)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: Path) -> None:
    """Raise `DamagedFile` unless a path is a regular file: opening a FIFO or a device could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedFile("not a regular file", file=path)
