"""The orchestrator on a time axis: how busy the permits are, and how late the event loop runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

LAG_PROBE = 0.05
"""Seconds between two looks at the event loop's lag."""


async def log_periodically(interval: float, gauges: Callable[[], dict[str, float]], emit: Callable[..., None]) -> None:
    """Every `interval` seconds, `emit` the gauges together with the event loop's lag since the last time."""
    while True:
        lags = []
        end = time.monotonic() + interval
        while time.monotonic() < end:
            before = time.monotonic()
            await asyncio.sleep(LAG_PROBE)
            lags.append(time.monotonic() - before - LAG_PROBE)
        emit({**gauges(), **lag_metrics(lags)})


def lag_metrics(lags: list[float]) -> dict[str, float]:
    quantiles = np.quantile(lags, [0.5, 0.9, 0.99, 1.0])
    return dict(
        zip((f"event_loop_lag/{name}" for name in ("p50", "p90", "p99", "max")), quantiles.tolist(), strict=True)
    )
