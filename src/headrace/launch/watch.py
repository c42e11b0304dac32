"""Detect a run that is stuck: a process without a heartbeat, or no progress.

Pure: takes the time and the statuses, returns messages. The messages report what each process is doing, not a cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.status import ProcessStatus
from headrace.observe.terminal import activity

STALL_S = 60.0
"""Time without a heartbeat or progress before the first message; the interval then doubles."""
RECENT_STEPS = 10
"""Number of steps whose duration sets the threshold of a stall."""


def stall_threshold(step_seconds: Sequence[float], least_s: float = STALL_S) -> float:
    """Return the seconds without progress that count as a stall: three times the longest recent step, or `least_s`."""
    return max(least_s, 3 * max(step_seconds[-RECENT_STEPS:], default=0.0))


class Watch:
    """Remembers the last progress, and when each message was last returned."""

    def __init__(self, now: float, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._progress: object = (0, [])
        self._moved_at = now
        self._next_stall = 0.0
        self._next_silence: dict[str, float] = {}

    def find_problems(
        self, now: float, progress: int, statuses: Mapping[str, ProcessStatus], step_seconds: Sequence[float] = ()
    ) -> list[str]:
        """Return messages about silent processes and a stalled run.

        `progress` is any number that grows as the run proceeds; `step_seconds` are the durations of past steps.
        """
        return [*self._silences(now, statuses), *self._stall(now, progress, statuses, step_seconds)]

    def _silences(self, now: float, statuses: Mapping[str, ProcessStatus]) -> list[str]:
        sentences = []
        for name, status in statuses.items():
            silent = now - status.time
            if silent < self._stall_s:
                self._next_silence.pop(name, None)
            elif silent >= self._next_silence.get(name, self._stall_s):
                sentences.append(f"{name}: no heartbeat for {silent:.0f} s; its last state is: {status.state}")
                self._next_silence[name] = 2 * silent
        return sentences

    def _stall(
        self, now: float, progress: int, statuses: Mapping[str, ProcessStatus], step_seconds: Sequence[float]
    ) -> list[str]:
        """Micro-batches and rollouts count as progress. The view shows problems that processes report themselves."""
        moves = (progress, [(name, str(status.progress)) for name, status in statuses.items() if status.progress])
        if moves != self._progress or any(status.problem for status in statuses.values()):
            self._progress, self._moved_at, self._next_stall = moves, now, 0.0
        still = now - self._moved_at
        if still < max(self._next_stall, stall_threshold(step_seconds, self._stall_s)):
            return []
        self._next_stall = 2 * still
        longest = max(step_seconds[-RECENT_STEPS:], default=None)
        steps = "no step has finished yet" if longest is None else f"recent steps took up to {longest:.0f} s"
        doings = "; ".join(f"{name}: {activity(status, now)}" for name, status in statuses.items())
        return [f"no progress for {still:.0f} s ({steps}). {doings or 'No process has reported anything yet'}"]


def is_up(status: ProcessStatus | None) -> bool:
    return status is not None and not status.state.startswith(("starting", "loading"))


def not_up(names: Sequence[str], statuses: Mapping[str, ProcessStatus], now: float) -> list[str]:
    """Return the processes that are still starting, each with its activity."""
    missing = []
    for name in names:
        status = statuses.get(name)
        if not is_up(status):
            missing.append(f"{name} ({'has not reported yet' if status is None else activity(status, now)})")
    return missing
