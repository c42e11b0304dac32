"""Whether a process that died is started again, and when. Takes the time and what is known: no clock, no processes."""

from __future__ import annotations

from headrace.observe.history import History

DELAY = 1.0
"""Seconds by which the wait grows with every restart in a row; the first has none."""
LONGEST_DELAY = 60.0


class Restarts:
    """How often each process was started again since the run last got further, and which are about to be."""

    def __init__(self, most: int, delay: float = DELAY) -> None:
        self.most = most
        self.in_a_row: dict[str, int] = {}
        self._delay = delay
        self._furthest = 0
        self._due: dict[str, float] = {}

    def look(self, history: History) -> None:
        """Progress clears the counts. Steps that are trained again after a restart are none."""
        reached = history.step + max(history.steps, default=0) + sum(map(len, history.evals.values()))
        if reached > self._furthest:
            self._furthest = reached
            self.in_a_row.clear()

    def allows(self, name: str) -> bool:
        return self.in_a_row.get(name, 0) < self.most

    def plan(self, name: str, now: float) -> float:
        """Decide to start a process again; returns the seconds until then."""
        before = self.in_a_row.get(name, 0)
        self.in_a_row[name] = before + 1
        delay = min(before * self._delay, LONGEST_DELAY)
        self._due[name] = now + delay
        return delay

    def is_planned(self, name: str) -> bool:
        return name in self._due

    def take_due(self, now: float) -> list[str]:
        """The processes whose wait is over; each is handed out once."""
        due = [name for name, moment in self._due.items() if moment <= now]
        for name in due:
            del self._due[name]
        return due
