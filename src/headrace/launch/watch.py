"""Notices what is wrong with a run that has not failed: a process without a sign of life, or nothing that moves.

Takes the time and what is known, returns sentences: no clock, no files. Says what is awaited from whom and leaves
guessing at the cause to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.status import ProcessStatus
from headrace.observe.terminal import activity

PATIENCE = 60.0
"""Seconds without a heartbeat, or without progress, until it is said; then at growing intervals."""
RECENT = 10
"""Steps by whose length a stall is judged."""


def stall_threshold(step_seconds: Sequence[float], least: float = PATIENCE) -> float:
    """Return the seconds without progress that are worth a word: three times the longest recent step, or `least`."""
    return max(least, 3 * max(step_seconds[-RECENT:], default=0.0))


class Watch:
    """The memory of what was last seen moving, and when it was last complained about."""

    def __init__(self, now: float, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._progress: object = (0, [])
        self._moved_at = now
        self._next_stall = 0.0
        self._next_silence: dict[str, float] = {}

    def look(
        self, now: float, progress: int, statuses: Mapping[str, ProcessStatus], step_seconds: Sequence[float] = ()
    ) -> list[str]:
        """Return what there is to say now.

        `progress` is any number that grows as the run moves; `step_seconds` is how long past steps took.
        """
        return [*self._silences(now, statuses), *self._stall(now, progress, statuses, step_seconds)]

    def _silences(self, now: float, statuses: Mapping[str, ProcessStatus]) -> list[str]:
        sentences = []
        for name, status in statuses.items():
            silent = now - status.time
            if silent < self._patience:
                self._next_silence.pop(name, None)
            elif silent >= self._next_silence.get(name, self._patience):
                sentences.append(f"{name} has given no sign of life for {silent:.0f} s; it was last {status.state}")
                self._next_silence[name] = 2 * silent
        return sentences

    def _stall(
        self, now: float, progress: int, statuses: Mapping[str, ProcessStatus], step_seconds: Sequence[float]
    ) -> list[str]:
        """A micro-batch or a rollout is progress, too. What a process reports as a problem is shown by the view."""
        moves = (progress, [(name, str(status.progress)) for name, status in statuses.items() if status.progress])
        if moves != self._progress or any(status.problem for status in statuses.values()):
            self._progress, self._moved_at, self._next_stall = moves, now, 0.0
        still = now - self._moved_at
        if still < max(self._next_stall, stall_threshold(step_seconds, self._patience)):
            return []
        self._next_stall = 2 * still
        longest = max(step_seconds[-RECENT:], default=None)
        steps = "no step has finished yet" if longest is None else f"recent steps took up to {longest:.0f} s"
        doings = "; ".join(f"{name}: {activity(status, now)}" for name, status in statuses.items())
        return [f"no progress for {still:.0f} s ({steps}). {doings or 'No process has reported anything yet'}"]


def is_up(status: ProcessStatus | None) -> bool:
    return status is not None and not status.state.startswith(("starting", "loading"))


def not_up(names: Sequence[str], statuses: Mapping[str, ProcessStatus], now: float) -> list[str]:
    """The processes that are still starting, each with what it is doing."""
    missing = []
    for name in names:
        status = statuses.get(name)
        if not is_up(status):
            missing.append(f"{name} ({'has not reported yet' if status is None else activity(status, now)})")
    return missing
