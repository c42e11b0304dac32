"""Automatic limit on episodes in flight: keep the engines busy and their queues short.

An episode does not always occupy an engine: while it runs a tool, the engine can serve another one. The limit therefore
follows the engines' reports. It grows by a fraction of their capacity while they have free capacity and empty queues.
It shrinks by a fraction of itself when the queue gets as long as the capacity, when the KV cache is nearly full, or
when requests are preempted. Otherwise it stays. When engines come or go, it changes in proportion to the capacity.

With n episodes in flight and b in a batch, an episode lasts n / b steps on average, and a long one several times that.
So with many slots and small batches the longest rollouts get too old. They are dropped, and the remaining ones are
shorter than what the policy samples. Therefore the limit also follows the share of rollouts dropped for their age.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from headrace.inference.schema import Health

log = logging.getLogger(__name__)

INITIAL_QUEUE = 0.5
"""Initial number of episodes beyond the engines' capacity, as a fraction of it."""
MAX_CAPACITIES = 16
"""Upper bound of the limit, in multiples of the capacity: above it, an environment's tools are the bottleneck."""
GROWTH = 0.05
"""Growth of the limit per report, as a fraction of the capacity."""
SHRINKAGE = 0.1
"""Reduction of the limit per report, as a fraction of the limit."""
SMOOTHING = 0.2
"""Weight of the latest report in the moving averages: requests come and go in waves."""
FULL = 0.95
"""Fraction of the capacity in use above which the engines count as busy."""
KV_HIGH, KV_LOW = 0.95, 0.85
"""KV cache usage above which the limit shrinks, and below which it may grow."""
MAX_OUTDATED, MIN_OUTDATED = 0.05, 0.02
"""Share of the rollouts dropped for their age above which the limit shrinks, and below which it may grow again."""
AGE_SHRINKAGE, AGE_GROWTH = 0.2, 0.1
"""Relative changes of the bound that keeps rollouts from getting too old."""
LOGGED_CHANGE = 0.2
"""Relative change of the limit that is logged."""


def initial_limit(capacity: int) -> int:
    """Return the first limit for engines that run `capacity` requests at once."""
    return int(capacity * (1 + INITIAL_QUEUE))


class Concurrency:
    """Adjusts `limit`, the most episodes in flight; never below `least`, the largest group that must run at once.

    `max_age`: optimizer steps after which a rollout is dropped (`max_off_policy_steps`).
    """

    def __init__(self, capacity: int, least: int, max_age: int = 8) -> None:
        self.limit = max(least, initial_limit(capacity))
        self._least, self._max_age = least, max_age
        self._age_limit = math.inf
        """Upper bound of the limit, so that episodes do not get too old."""
        self._batches = self._outdated = self._trained = 0
        """Since the last change of this bound: batches, rollouts that were dropped for their age, trained rollouts."""
        self._logged = self.limit
        self._running: float | None = None
        self._waiting = 0.0
        """Moving averages of requests relative to the engines' capacity."""
        self._preemptions: dict[str, int] = {}
        self._capacity = max(1, capacity)
        """Requests that the engines of the last report run at once, including engines that wait for the trainer."""

    def update(self, engines: Mapping[str, Health], in_flight: int) -> int:
        """Adjust the limit to health reports by address, with `in_flight` episodes now; return it."""
        before, self._preemptions = self._preemptions, {url: health.preemptions for url, health in engines.items()}
        # The count of an engine that is new or was restarted begins with this report.
        preempted = sum(max(0, count - before.get(url, count)) for url, count in self._preemptions.items())
        responding = sum(health.capacity for health in engines.values())
        if responding and responding != self._capacity:
            self.limit = max(self._least, round(self.limit * responding / self._capacity))
            self._age_limit *= max(1.0, responding / self._capacity)  # faster engines make younger rollouts
            self._capacity = responding
        active = [health for health in engines.values() if not (health.paused or health.waits_for_trainer)]
        capacity = sum(health.capacity for health in active)
        if not capacity:
            return self.limit
        running = sum(health.running for health in active) / capacity
        waiting = sum(health.waiting for health in active) / capacity
        if self._running is None:
            self._running, self._waiting = running, waiting
        self._running += SMOOTHING * (running - self._running)
        self._waiting += SMOOTHING * (waiting - self._waiting)
        kv_usage = max(health.kv_usage for health in active)
        has_capacity = self._running < FULL and self._waiting < 1 - FULL and kv_usage < KV_LOW
        # Whether the limit keeps more episodes from starting: a group may wait until it fits as a whole.
        is_reached = in_flight > min(self.limit * (1 - GROWTH), self.limit - self._least)
        if in_flight > self.limit:
            pass  # the limit was lowered and is not in effect yet: the reports are about the old one
        elif preempted or kv_usage > KV_HIGH or self._waiting > 1:
            self.limit = max(self._least, math.floor(self.limit * (1 - SHRINKAGE)))
        elif has_capacity and is_reached:
            self.limit = max(self.limit, min(self.limit + math.ceil(GROWTH * capacity), MAX_CAPACITIES * capacity))
        self.limit = int(min(self.limit, self._age_limit))
        if abs(self.limit - self._logged) > LOGGED_CHANGE * self._logged:
            log.info(
                "episodes in flight: at most %d instead of %d (the engines run %.0f%% of %d, and %.0f%% are queued)",
                self.limit, self._logged, 100 * self._running, capacity, 100 * self._waiting,
            )  # fmt: skip
            self._logged = self.limit
        return self.limit

    def record_batch(self, trained: int, outdated: int, in_flight: int) -> int:
        """Adjust the limit to a batch of `trained` rollouts, and `outdated` ones since the last batch; return it.

        A change has an effect once the rollouts that began before it are trained or dropped: a bound is kept so long.
        """
        self._batches += 1
        self._trained += trained
        self._outdated += outdated
        if self._batches > self._max_age:
            share = self._outdated / max(1, self._trained + self._outdated)
            if share > MAX_OUTDATED:
                self._age_limit = max(self._least, (1 - AGE_SHRINKAGE) * min(in_flight, self.limit))
                self.limit = int(min(self.limit, self._age_limit))
            elif share < MIN_OUTDATED:
                self._age_limit *= 1 + AGE_GROWTH
            self._batches = self._outdated = self._trained = 0
        return self.limit


TAIL_SHARE = 0.5
"""Share of the slots below which the wait for a batch is its tail."""


class Occupancy:
    """Use of the engines' slots by episodes since the last step; `slots` of all engines may change at any time.

    An engine runs up to `capacity` requests at once: its slots. An episode in flight takes one, also while it runs a
    tool. Decoding costs about the same for few requests as for many, so time with few of them is mostly lost.
    """

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
