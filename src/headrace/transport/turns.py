"""Whose turn it is on a device that a run's trainer and its engines share: locks on files of the run directory.

`turn` is held by whoever computes: by the trainer alone, or by all engines together. `wanted` is held by whoever waits
for it. Of two more files an engine holds `cache` while it has memory that it could give up for the trainer, and `lent`
while the trainer has it. No torch here: what is done at a hand-over is the business of the two sides.

Why nobody waits for ever. Whoever wants the turn takes `wanted` first and `turn` second, lets go of `wanted` once it
has `turn`, and never waits for anything while it has `turn`: there is no circle to wait in. The kernel takes the locks
of a process that dies, at whatever moment, and one that lives gives `turn` back: the trainer after its step, an engine
between two of its own, as soon as it sees that the trainer has `wanted`. Nobody passes whoever holds `wanted`: after a
turn of the trainer an engine that waits comes first, and the other way round.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

POLL = 0.004
"""Seconds between two tries of whoever waits, and between two looks of an engine that has nothing else to do."""
ALL = "all"


class Turn:
    """One side's hold on the device: the `trainer`'s, which is exclusive, or an engine's, which other engines share.

    Everything returns at once. One thread of a process may use it.
    """

    def __init__(self, directory: Path, *, trainer: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._how = fcntl.LOCK_EX if trainer else fcntl.LOCK_SH
        self._wanted, self._turn = _Lock(directory / "wanted"), _Lock(directory / "turn")
        self._cache, self._lent = _Lock(directory / "cache"), _Lock(directory / "lent")

    @property
    def is_ours(self) -> bool:
        return self._turn.held

    def try_take(self) -> bool:
        """Get nearer to the turn; whether it is ours now. To be called again and again until it is."""
        if not self._turn.held and self._wanted.take(self._how) and self._turn.take(self._how):
            self._wanted.leave()
        return self._turn.held

    def leave(self) -> None:
        """Let the others have it, or stop waiting for it."""
        self._turn.leave()
        self._wanted.leave()

    def close(self) -> None:
        for lock in (self._wanted, self._turn, self._cache, self._lent):
            lock.close()

    # What the trainer tells and is told

    def ask_for(self, memory: int | None) -> None:
        """Say how many bytes will be needed beyond what is held, None for all there are; before the turn is taken."""
        self._wanted.write(ALL if memory is None else str(memory))

    @property
    def cache_is_kept(self) -> bool:
        """Whether an engine has memory that it could give up. It does so at a hand-over alone, if it is asked to."""
        return self._cache.is_held_by_others

    @property
    def is_all_kept(self) -> bool:
        """Whether every engine that is up has all of its memory: what the trainer has taken is nobody's but its own."""
        return self.cache_is_kept and not self._lent.is_held_by_others

    # What an engine tells and is told

    @property
    def is_wanted(self) -> bool:
        """Whether the trainer waits for the turn."""
        return self._wanted.is_held_alone_by_another

    @property
    def wanted_memory(self) -> int | None:
        """What the trainer said that it will need; None for all there is."""
        said = self._wanted.read()
        return int(said) if said.isdecimal() else None

    def keep_cache(self) -> None:
        """Say that there is memory which could be given up, while the turn is the engine's."""
        self._cache.share()
        self._lent.leave()

    def lend_cache(self) -> None:
        """Say that it was given up, while the turn is the engine's."""
        self._lent.share()
        self._cache.leave()


class _Lock:
    """A file that is locked, shared or alone; others have descriptors of their own for it."""

    def __init__(self, path: Path) -> None:
        self.held = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self, how: int) -> bool:
        """Whether it is held now. One that is held stays as it is."""
        self.held = self.held or self._try(how)
        return self.held

    def share(self) -> None:
        """Take one that others have for the moment of a look at most."""
        if not self.held:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self.held = True

    def leave(self) -> None:
        if self.held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.held = False

    @property
    def is_held_by_others(self) -> bool:
        return self._is_refused(fcntl.LOCK_EX)

    @property
    def is_held_alone_by_another(self) -> bool:
        return self._is_refused(fcntl.LOCK_SH)

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def read(self) -> str:
        return os.pread(self._descriptor, 64, 0).decode()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.held = -1, False

    def _is_refused(self, how: int) -> bool:
        """Of a lock that is not held here."""
        if not self._try(how):
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
