"""Files and directories that are either whole or absent, whatever is killed when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

MARKER = "COMPLETE.json"
"""Written last into a directory that others wait for: without it, it is not complete."""


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write beside, fsync, rename, fsync the directory: a reader sees the old file or all of the new one.

    `mode` says who may read it, less what the umask takes away, from its first byte on.
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


def write_directory(final: Path, fill: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `fill` write into a hidden directory beside, then put it in the place of `final`.

    `durable` fsyncs every file first: what is written must then survive a power loss, not only a kill.
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
    """Where `write_directory` fills a directory before it takes its place."""
    return final.with_name(f".{final.name}.tmp")


def link_tree(source: Path, target: Path) -> None:
    """Another name for a directory whose files never change: it costs no disk where the file system allows it."""
    write_directory(target, lambda draft: _copy_into(source, draft))


def _copy_into(source: Path, draft: Path) -> None:
    shutil.copytree(source, draft, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
