"""Atomic writes of files and directories: readers see a complete one or none, also after a kill. Reads that may block.

Opening a FIFO or a device may block, so both are refused before. A file on a mount whose server is gone cannot be
recognized in advance: it is read in a daemon thread, which may never return.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.errors import Fenced
from headrace.rollout.schema import DamagedFile

T = TypeVar("T")

MARKER = "COMPLETE.json"
"""Written last into a directory that another process waits for; a directory without it is incomplete."""
DIGITS = 8 * "[0-9]"
STEP = f"step-{DIGITS}"
"""Glob pattern of the files and directories of a step; other names in the same directory are ignored."""
DISCARD_TIMEOUT_S = 10.0
_NONCE = uuid.uuid4().hex[:8]
_drafts: dict[Path, Path] = {}
"""The folder for the drafts of this process's epoch, by run directory."""


def temporary(path: Path) -> Path:
    """Return a hidden path beside `path` that no other process, on any host, uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{_NONCE}.tmp")


@contextmanager
def use_drafts(root: Path, drafts: Path) -> Iterator[None]:
    """Write everything in `root` to the folder `drafts` first. Once that is deleted, nothing more can be written."""
    _drafts[root.absolute()] = drafts.absolute()
    try:
        yield
    finally:
        del _drafts[root.absolute()]


def share_drafts(gather: Callable[[dict[Path, Path]], list[dict[Path, Path]]]) -> None:
    """Use the drafts folder of the first rank, which holds the epoch, on all ranks."""
    _drafts.update(gather(_drafts)[0])


def discard_drafts(directory: Path) -> None:
    """Delete a folder of drafts, also while a process that was replaced still writes into it."""
    deadline = time.monotonic() + DISCARD_TIMEOUT_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or time.monotonic() > deadline:
                raise
        else:
            return


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write to a temporary file, fsync, rename, fsync the directory: a reader sees the old or the new content.

    `mode` is the file mode before the umask, from the first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _fenced_draft(path) or temporary(path)
    try:
        with _fenced(path), open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        move(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_directory(final: Path, fill: Callable[[Path], object], *, durable: bool = True) -> None:
    """Call `fill` on a hidden directory next to `final`, then rename it to `final`.

    `durable` fsyncs every file before, so that the content survives a power loss, not only a kill.
    """
    draft = draft_of(final)
    shutil.rmtree(draft, ignore_errors=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    with _fenced(final):
        draft.mkdir()
    try:
        fill(draft)
        for path in (*draft.rglob("*"), draft) if durable else ():
            sync(path)
        if final.exists():
            discard(final)
        move(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(final.parent)


def draft_of(final: Path) -> Path:
    """Return the path where a directory is written before it is renamed to `final`.

    It is in the folder of this process's epoch if it has one (`epochs`), else beside `final`.
    """
    with _fenced(final):
        draft = _fenced_draft(final)
        if draft is not None:
            draft.parent.stat()  # only for an early error: the later rename would fail anyway
    return draft or final.with_name(f".{final.name}.tmp")


def _fenced_draft(final: Path, end: str = "tmp") -> Path | None:
    """Return the path for a draft of `final` in the folder of this process's epoch; None if there is no such folder."""
    absolute = final.absolute()
    for root, drafts in _drafts.items():
        if absolute.is_relative_to(root):
            parts = absolute.relative_to(root).parts
            # A link may lead to another disk, and a rename does not work between disks.
            if not any(root.joinpath(*parts[:depth]).is_symlink() for depth in range(1, len(parts))):
                return drafts / f"{'.'.join(parts)}.{end}"
    return None


def move(draft: Path, final: Path) -> None:
    """Rename a draft to its final name. Raises `Fenced` if another process has taken over."""
    with _fenced(final):
        os.replace(draft, final)


def discard(path: Path) -> None:
    """Delete a file or directory after an atomic rename, so that readers never see a partly deleted directory.

    The rename fails if another process has taken over. A file of a process without an epoch needs no rename.
    """
    old = _fenced_draft(path, "old")
    if old is None and not path.is_dir():
        path.unlink()
        return
    old = old or path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    move(path, old)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink()


@contextmanager
def _fenced(final: Path) -> Iterator[None]:
    """Raise `Fenced` for a missing file if another process has deleted this process's drafts."""
    try:
        yield
    except FileNotFoundError as error:
        draft = _fenced_draft(final)
        if draft is not None and not draft.parent.exists():
            raise Fenced(f"{final} was not written: another process has taken over from this one") from error
        raise


def link_tree(source: Path, target: Path, without: str | None = None) -> None:
    """Copy a directory whose files never change, by hard links where the file system has them.

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
    """Fsync a file, or a directory, which makes renames in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: Path) -> None:
    """Raise `DamagedFile` unless a path is a regular file: opening a FIFO or a device could block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedFile("not a regular file", file=path)


def require_regular(path: Path) -> Path:
    """Return `path`; raise `OSError` unless it is a regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


def in_daemon_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread, which does not delay the end of the process, as threads of executors do."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"reading-{id(future):x}", daemon=True).start()
    return future
