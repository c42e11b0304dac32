"""Notices what is wrong with a run that has not failed: a process without a sign of life, or nothing that moves.

Takes the time and what is known, returns sentences: no clock, no files. Says what is awaited from whom and leaves
guessing at the cause to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.status import ProcessStatus
from headrace.observe.terminal import activity

PATIENCE = 60.0
"""Seconds without a heartbeat, or without a new step or evaluation, until it is said; then at growing intervals."""


class Watch:
    """The memory of what was last seen moving, and when it was last complained about."""

    def __init__(self, now: float, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._progress = 0
        self._moved_at = now
        self._next_stall = patience
        self._next_silence: dict[str, float] = {}

    def look(self, now: float, progress: int, statuses: Mapping[str, ProcessStatus]) -> list[str]:
        """What there is to say now. `progress` is any number that grows as the run moves."""
        return [*self._silences(now, statuses), *self._stall(now, progress, statuses)]

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

    def _stall(self, now: float, progress: int, statuses: Mapping[str, ProcessStatus]) -> list[str]:
        if progress != self._progress:
            self._progress, self._moved_at, self._next_stall = progress, now, self._patience
        still = now - self._moved_at
        if still < self._next_stall:
            return []
        self._next_stall = 2 * still
        doings = "; ".join(f"{name}: {activity(status, now)}" for name, status in statuses.items())
        return [f"nothing has moved for {still:.0f} s. {doings or 'No process has reported anything yet'}"]


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
