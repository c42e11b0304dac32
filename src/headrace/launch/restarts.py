"""Decide what is restarted and when, and report how a run recovered. Pure: takes the time.

A unit is a process, or a group of processes on several hosts that are started and restarted together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.launch.node_messages import LEASE_S
from headrace.launch.out_of_memory import OutOfMemory
from headrace.observe.metrics import History

RESTART_DELAY_S = 1.0
"""By how much the delay grows with every restart without progress; the first has none."""
MAX_RESTART_DELAY_S = 60.0
HOST_NEWS_S = LEASE_S + 5.0
"""Time in which a failure in a group may turn out to be the loss of a host."""
FIRST_NOTICE_S = 10.0
"""Time of waiting for hosts between the first two messages; it then doubles."""


class Restarts:
    """Counts the restarts of each unit since the last progress, and schedules them."""

    def __init__(self, most: int, delay_s: float = RESTART_DELAY_S) -> None:
        self.most = most
        self.in_a_row: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        """By unit that was restarted since the last progress: how it ended."""
        self.due: dict[str, float] = {}
        """By unit: when it is restarted."""
        self.out_of_memory: set[str] = set()
        """Units of which a process was ended for memory since the last progress."""
        self._delay_s = delay_s
        self._furthest = 0
        self._failed_at: dict[str, float] = {}

    def record_progress(self, history: History) -> None:
        """Reset the counts if the run has got further. Steps repeated after a restart do not count."""
        reached = history.step + max(history.steps, default=0) + sum(map(len, history.evals.values()))
        if reached > self._furthest:
            self._furthest = reached
            self.in_a_row.clear()
            self.ends.clear()
            self.out_of_memory.clear()

    def allows(self, unit: str, out_of_memory: OutOfMemory | None = None) -> bool:
        """Return whether a unit may be restarted, after an end for memory only once, if at all."""
        if out_of_memory is not None and (out_of_memory.repeats or unit in self.out_of_memory):
            return False
        return self.in_a_row.get(unit, 0) < self.most

    def awaits_news(self, unit: str, now: float) -> bool:
        """Return whether the failure of a group's member may still be explained by the loss of another one's host."""
        return now - self._failed_at.setdefault(unit, now) < HOST_NEWS_S

    def schedule(self, unit: str, now: float) -> float:
        """Schedule a restart, and return the seconds until then."""
        before = self.in_a_row.get(unit, 0)
        self.in_a_row[unit] = before + 1
        self._failed_at.pop(unit, None)
        delay_s = min(before * self._delay_s, MAX_RESTART_DELAY_S)
        self.due[unit] = now + delay_s
        return delay_s

    def take_due(self, now: float, ending: Collection[str] = ()) -> list[str]:
        """Remove and return the units that are to be restarted now, except those with processes that still end."""
        units = [unit for unit, due_at in self.due.items() if due_at <= now and unit not in ending]
        for unit in units:
            del self.due[unit]
        return units


class HostWait:
    """A wait for hosts, which are too few; it reports itself at growing intervals. `key`: that of its limit."""

    def __init__(self, now: float, limit_s: float, key: str = "launch.start_timeout") -> None:
        self._since, self._limit_s, self._key, self._next_s = now, limit_s, key, 0.0

    def is_over(self, now: float) -> bool:
        return now - self._since > self._limit_s

    def is_due(self, now: float) -> bool:
        """Whether it is time for a notice."""
        return now - self._since >= self._next_s

    def notice(self, now: float, reason: str) -> str:
        waited = now - self._since
        self._next_s = max(FIRST_NOTICE_S, 2 * waited)
        left = f"giving up in {self._limit_s - waited:.0f} s ({self._key})"
        return f"waiting for hosts for {waited:.0f} s; {left}: {reason}"


@dataclass
class Recovery:
    """The way back of a trainer that was lost at `step`: how long it takes, and which steps are trained again."""

    cause: str
    began: float
    step: int
    repeated_from: int | None = None

    def record(self, now: float, step: int) -> str | None:
        """Take a trained step; return a report at the first one that is new."""
        if step <= self.step:
            self.repeated_from = min(step, self.repeated_from or step)
            return None
        if self.repeated_from is None:
            repeated = "no step was repeated"
        elif self.repeated_from == self.step:
            repeated = f"step {self.step} was repeated"
        else:
            repeated = f"steps {self.repeated_from} to {self.step} were repeated"
        return f"step {step} was trained {now - self.began:.0f} s after {self.cause}; {repeated}"
