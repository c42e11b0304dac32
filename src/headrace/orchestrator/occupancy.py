"""Use of the engines' slots by episodes, over the time of a step.

An engine runs up to `capacity` requests at once: its slots. An episode in flight takes one, also while it runs a tool.
Decoding costs about the same for few requests as for many, so time with few of them is mostly lost.
"""

from __future__ import annotations

TAIL_SHARE = 0.5
"""Share of the slots below which the wait for a batch is its tail."""


class Occupancy:
    """Sums since the last step. `slots` of all engines together may change at any time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._seconds = self._used_seconds = self._tail_seconds = 0.0

    def advance(self, seconds: float, in_flight: int, *, awaits_rollouts: bool) -> None:
        """Count time with `in_flight` episodes. `awaits_rollouts`: whether a batch waits for them."""
        share = min(1.0, in_flight / self.slots)
        self._seconds += seconds
        self._used_seconds += seconds * share
        if awaits_rollouts and share < TAIL_SHARE:
            self._tail_seconds += seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the step that ends now."""
        used = self._used_seconds / self._seconds if self._seconds else 0.0
        metrics = {"perf/slots_used": used, "time/tail": self._tail_seconds}
        self._seconds = self._used_seconds = self._tail_seconds = 0.0
        return metrics
