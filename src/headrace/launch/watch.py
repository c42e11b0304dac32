"""Detect a stalled run and silent processes. Pure: takes the time. Messages report what processes do, not a cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.status import ObservedStatus, is_up
from headrace.observe.terminal import activity

STALL_S = 60.0
"""Time without a heartbeat or progress before the first message; the interval then doubles."""
RECENT_STEPS = 10
"""Number of steps whose longest duration, times three, is not yet a stall."""


class Watch:
    """Remembers the last progress, and when each message was last returned."""

    def __init__(self, now: float, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._progress: object = (0, [])
        self._moved_at = now
        self._next_stall = 0.0
        self._next_silence: dict[str, float] = {}

    def find_problems(
        self, now: float, progress: int, statuses: Mapping[str, ObservedStatus], step_seconds: Sequence[float] = ()
    ) -> list[str]:
        """Return messages about silent processes and a stalled run.

        `progress` is any number that grows as the run proceeds; `step_seconds` are the durations of past steps.
        Micro-batches and rollouts count as progress. The view shows problems that processes report themselves.
        """
        sentences = []
        for name, status in statuses.items():
            silent = status.silent_s
            if silent < self._stall_s:
                self._next_silence.pop(name, None)
            elif silent >= self._next_silence.get(name, self._stall_s):
                sentences.append(f"{name}: no heartbeat for {silent:.0f} s; its last state is: {status.state}")
                self._next_silence[name] = 2 * silent
        moves = (progress, [(name, str(status.progress)) for name, status in statuses.items() if status.progress])
        if moves != self._progress or any(status.problem for status in statuses.values()):
            self._progress, self._moved_at, self._next_stall = moves, now, 0.0
        still = now - self._moved_at
        longest = max(step_seconds[-RECENT_STEPS:], default=0.0)
        if still >= max(self._next_stall, self._stall_s, 3 * longest):
            self._next_stall = 2 * still
            steps = f"recent steps took up to {longest:.0f} s" if step_seconds else "no step has finished yet"
            doings = "; ".join(f"{name}: {activity(status)}" for name, status in statuses.items())
            doings = doings or "No process has reported anything yet"
            sentences.append(f"no progress for {still:.0f} s ({steps}). {doings}")
        return sentences


def not_up(names: Sequence[str], statuses: Mapping[str, ObservedStatus]) -> list[str]:
    """Return the processes that are still starting, each with its activity."""
    missing = []
    for name in names:
        status = statuses.get(name)
        if not is_up(status):
            missing.append(f"{name} ({'has not reported yet' if status is None else activity(status)})")
    return missing
