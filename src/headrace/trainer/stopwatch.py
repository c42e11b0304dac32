"""Where the seconds of a step went."""

from __future__ import annotations

import time


class Stopwatch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._started = self._lapped = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under a name."""
        now = time.perf_counter()
        self.laps[name] = now - self._lapped
        self._lapped = now

    def total(self) -> float:
        return time.perf_counter() - self._started
