"""File locks (flock) between processes of one host. The kernel releases the locks of a process that ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.004
"""Interval between two attempts to acquire the lock, and between two polls of an idle engine."""
ALL_MEMORY = "all"
NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of network file systems that have no locks; leases keep the processes of several hosts apart."""


@contextmanager
def lock(path: Path, on_wait: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of a file, waiting for it if necessary; without any effect on a file system without locks.

    Before waiting, `on_wait` is called; it may raise. Yields the descriptor that holds the lock: processes that inherit
    it hold it too, until the last of them ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file."""
    if not path.is_file():
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS_ERRNOS:
            raise
    finally:
        os.close(descriptor)
    return False


class DeviceLock:
    """One side's lock on a GPU that trainer and engines share: exclusive for the trainer, shared between engines.

    | file | held by |
    |---|---|
    | `turn` | the side that computes: the trainer (exclusive), or all engines together (shared) |
    | `wanted` | the side that waits for `turn`; the trainer writes the bytes that its step needs into it |
    | `cache` | an engine whose KV cache is resident, so that it could be released for the trainer |
    | `lent` | an engine whose KV cache is released |

    Freedom from deadlock: each side acquires `wanted` first and `turn` second, releases `wanted` once it holds `turn`,
    and waits for nothing while it holds `turn`. The kernel releases the locks of a process that dies. A live process
    releases `turn` itself: the trainer after its step, an engine between two steps as soon as the trainer holds
    `wanted`. Fairness: the holder of `wanted` is always next, so the two sides alternate when both wait.

    No method blocks. Not thread-safe: only one thread of a process may use a handle. Left out on purpose: releasing and
    restoring GPU memory at a hand-over, which the two sides do themselves (no torch).
    """

    def __init__(self, directory: Path, *, trainer: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._mode = fcntl.LOCK_EX if trainer else fcntl.LOCK_SH
        self._wanted, self._turn = _FileLock(directory / "wanted"), _FileLock(directory / "turn")
        self._cache, self._lent = _FileLock(directory / "cache"), _FileLock(directory / "lent")

    @property
    def is_held(self) -> bool:
        return self._turn.is_held

    def try_acquire(self) -> bool:
        """Advance towards holding the lock and return whether it is held; call repeatedly until it is."""
        if not self._turn.is_held and self._wanted.try_acquire(self._mode) and self._turn.try_acquire(self._mode):
            self._wanted.release()
        return self._turn.is_held

    def release(self) -> None:
        """Release the lock, or stop waiting for it."""
        self._turn.release()
        self._wanted.release()

    def close(self) -> None:
        for lock in (self._wanted, self._turn, self._cache, self._lent):
            lock.close()

    # Trainer side

    def request_memory(self, num_bytes: int | None) -> None:
        """Publish the bytes that the trainer needs beyond what it holds, None for all; call before acquiring."""
        self._wanted.write(ALL_MEMORY if num_bytes is None else str(num_bytes))

    @property
    def any_cache_is_resident(self) -> bool:
        """Whether an engine has a KV cache that it could release at a hand-over."""
        return self._cache.is_blocked(fcntl.LOCK_EX)

    @property
    def all_caches_are_resident(self) -> bool:
        """Whether every running engine has its KV cache, so that the trainer uses no memory of an engine."""
        return self.any_cache_is_resident and not self._lent.is_blocked(fcntl.LOCK_EX)

    # Engine side

    @property
    def is_requested_by_trainer(self) -> bool:
        return self._wanted.is_blocked(fcntl.LOCK_SH)

    @property
    def requested_memory(self) -> int | None:
        """Bytes that the trainer requested; None for all memory."""
        content = self._wanted.read()
        return int(content) if content.isdecimal() else None

    def mark_cache_resident(self) -> None:
        """Record that the KV cache could be released; only while the lock is held."""
        self._cache.acquire_shared()
        self._lent.release()

    def mark_cache_released(self) -> None:
        """Record that the KV cache is released; only while the lock is held."""
        self._lent.acquire_shared()
        self._cache.release()


class _FileLock:
    """A `flock` on a file, shared or exclusive, through a descriptor of its own."""

    def __init__(self, path: Path) -> None:
        self.is_held = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def try_acquire(self, mode: int) -> bool:
        """Return whether the lock is held after this attempt; a lock that is held keeps its mode."""
        self.is_held = self.is_held or self._try_lock(mode)
        return self.is_held

    def acquire_shared(self) -> None:
        """Block until the lock is held; others hold it exclusively only for the duration of a test."""
        if not self.is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self.is_held = True

    def release(self) -> None:
        if self.is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.is_held = False

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def read(self) -> str:
        return os.pread(self._descriptor, 64, 0).decode()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.is_held = -1, False

    def is_blocked(self, mode: int) -> bool:
        """Return whether another holder prevents this mode: LOCK_EX any, LOCK_SH an exclusive one. Not while held."""
        if not self._try_lock(mode):
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def _try_lock(self, mode: int) -> bool:
        try:
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
