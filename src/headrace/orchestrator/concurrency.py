"""How many episodes to have in flight, so that the engines are full and their line is short.

An episode is not always a request: while it waits for a tool, its place in the engine is free for another. How many
that takes nobody knows beforehand, so the limit follows what the engines report. It grows by a share of what they can
run while they have places free and nobody in line. It shrinks by a share of itself when the line gets as long as what
they run at once, when their KV cache is full, or when requests lose their place in it. In between it stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from headrace.inference.schema import Health

log = logging.getLogger(__name__)

IN_LINE = 0.5
"""Episodes at the start beyond what the engines run at once, as a share of that: so that they never run dry."""
MOST = 16
"""Times what the engines run at once: beyond, an environment's tools are what is slow."""
GROWTH = 0.05
SHRINKAGE = 0.1
SMOOTHING = 0.2
"""The weight of the latest report against those before it: requests come and go in waves."""
FULL = 0.95
"""The share of places taken above which nobody is missing."""
TIGHT, ROOMY = 0.95, 0.85
"""The share of the KV cache held above which there are too many requests, and below which there is room for more."""
TOLD = 0.2
"""A change by this share is worth a line in the log."""


def initial_limit(capacity: int) -> int:
    """What the engines run at once, and some in line."""
    return int(capacity * (1 + IN_LINE))


class Concurrency:
    """`limit` holds until the next reports; it is never below `least`, the largest group that must run at once."""

    def __init__(self, capacity: int, least: int) -> None:
        self.limit = max(least, initial_limit(capacity))
        self._least = least
        self._told = self.limit
        self._running: float | None = None
        self._waiting = 0.0
        """Requests relative to what the engines can run, on average."""
        self._preemptions: dict[str, int] = {}

    def follow(self, engines: Mapping[str, Health], in_flight: int) -> int:
        """The limit, given what the engines report, by address, and how many episodes there are at the moment."""
        preempted = self._count_preemptions(engines)
        at_work = [health for health in engines.values() if not (health.paused or health.stands_still)]
        capacity = sum(health.capacity for health in at_work)
        if not capacity:
            return self.limit
        self._smooth(
            sum(health.running for health in at_work) / capacity, sum(health.waiting for health in at_work) / capacity
        )
        held = max(health.kv_usage for health in at_work)
        if in_flight > self.limit:
            pass  # what is in flight has yet to come down to it: until then the reports are of another limit
        elif preempted or held > TIGHT or self._waiting > 1:
            self.limit = max(self._least, math.floor(self.limit * (1 - SHRINKAGE)))
        elif self._has_places_free and held < ROOMY and self._is_reached(in_flight):
            self.limit = max(self.limit, min(self.limit + math.ceil(GROWTH * capacity), MOST * capacity))
        self._tell(capacity)
        return self.limit

    def _is_reached(self, in_flight: int) -> bool:
        """Whether the limit is what keeps more episodes from starting: a group may wait until it fits as a whole."""
        return in_flight > min(self.limit * (1 - GROWTH), self.limit - self._least)

    @property
    def _has_places_free(self) -> bool:
        return self._running is not None and self._running < FULL and self._waiting < 1 - FULL

    def _smooth(self, running: float, waiting: float) -> None:
        if self._running is None:
            self._running, self._waiting = running, waiting
        self._running += SMOOTHING * (running - self._running)
        self._waiting += SMOOTHING * (waiting - self._waiting)

    def _count_preemptions(self, engines: Mapping[str, Health]) -> int:
        """Since the last report. An engine that is new, or was started again, begins to count."""
        before, self._preemptions = self._preemptions, {url: health.preemptions for url, health in engines.items()}
        return sum(max(0, count - before.get(url, count)) for url, count in self._preemptions.items())

    def _tell(self, capacity: int) -> None:
        if abs(self.limit - self._told) > TOLD * self._told:
            log.info(
                "episodes in flight: at most %d instead of %d (the engines run %.0f%% of %d, and %.0f%% are in line)",
                self.limit, self._told, 100 * (self._running or 0.0), capacity, 100 * self._waiting,
            )  # fmt: skip
            self._told = self.limit
