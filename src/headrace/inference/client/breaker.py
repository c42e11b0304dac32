"""Whether somebody who keeps failing is asked: a circuit breaker. The time is passed in.

Closed, it lets everybody through. It opens after a few failures in a row, for a time that doubles with each opening up
to a bound. Then it is half open: one trial is made, and if that goes well it closes again, but on probation: the next
failure opens it at once, and the next success ends the matter.
"""

from __future__ import annotations

FAILURES = 3
"""In a row, until it opens."""
FIRST_REST = 1.0
LONGEST_REST = 10.0
"""Seconds for which it is open, the first time and after many."""


class Breaker:
    def __init__(self) -> None:
        self._failures = 0
        self._openings = 0
        """Since the last success."""
        self._open_until: float | None = None
        self._on_trial = False

    @property
    def is_closed(self) -> bool:
        return self._open_until is None

    def fail(self, now: float) -> None:
        """What comes in late, while it is open, says nothing new."""
        self._failures += 1
        if self.is_closed and self._failures >= FAILURES:
            self._open(now)

    def succeed(self) -> None:
        self._failures = self._openings = 0
        self._open_until = None
        self._on_trial = False

    def is_due(self, now: float) -> bool:
        """Whether it is time for a trial."""
        return self._open_until is not None and now >= self._open_until

    def begin_trial(self, now: float) -> None:
        """If one is due. Until it is passed this stays open, and if it comes to nothing, for longer than before."""
        if self.is_due(now):
            self._open(now)
            self._on_trial = True

    def pass_trial(self) -> None:
        """Does nothing where none was begun."""
        if self._on_trial:
            self._open_until = None
            self._failures = FAILURES - 1
            self._on_trial = False

    def _open(self, now: float) -> None:
        self._open_until = now + min(FIRST_REST * 2**self._openings, LONGEST_REST)
        self._openings += 1
