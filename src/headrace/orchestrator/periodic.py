"""The orchestrator on a time axis: how busy the permits are, and how late the event loop runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

log = logging.getLogger(__name__)

LAG_PROBE = 0.05
"""Seconds between two looks at the event loop's lag."""
ALARMING_LAG = 1.0
"""Seconds of lag that are said: something computes where it should only move data."""
ADVICE = "Environments that compute belong into worker processes (workers = N on the environment)"


class PeriodicLogger:
    """Every `interval` seconds, `emit` the gauges together with the event loop's lag since the last time."""

    def __init__(
        self, interval: float, gauges: Callable[[], dict[str, float]], emit: Callable[[dict[str, float]], None]
    ) -> None:
        self._interval = interval
        self._gauges = gauges
        self._emit = emit
        self._alarm_above = ALARMING_LAG

    async def run(self) -> None:
        """For ever."""
        while True:
            lags = []
            end = time.monotonic() + self._interval
            while time.monotonic() < end:
                before = time.monotonic()
                await asyncio.sleep(LAG_PROBE)
                lags.append(time.monotonic() - before - LAG_PROBE)
            self._alarm(max(lags))
            self._emit({**self._gauges(), **lag_metrics(lags)})

    def _alarm(self, lag: float) -> None:
        """Said at growing lags, so that a run that is slow throughout says it a few times, not for ever."""
        if lag > self._alarm_above:
            self._alarm_above = 2 * lag
            log.warning(
                "the event loop stood still for %.1f s: an environment, algorithm or filter computes on it. %s",
                *(lag, ADVICE),
            )


def lag_metrics(lags: list[float]) -> dict[str, float]:
    quantiles = np.quantile(lags, [0.5, 0.9, 0.99, 1.0])
    return dict(
        zip((f"event_loop_lag/{name}" for name in ("p50", "p90", "p99", "max")), quantiles.tolist(), strict=True)
    )
