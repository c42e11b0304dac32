"""Monitoring of the event loop: its lag as metrics, and which code blocks it.

A reward function that computes for minutes delays every episode. Blocking code is reported from a thread, since the
loop itself could report it only afterwards, if ever.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import numpy as np

import headrace
from headrace.observe.status import Status

log = logging.getLogger(__name__)

LAG_PROBE_S = 0.05
"""Interval of the measurements of the event loop's lag."""
LAG_WARNING_S = 1.0
"""Lag above which the first warning is logged."""
BLOCKED_WARNING_S = 10.0
"""Time without an iteration of the loop until the first warning; later ones follow at growing intervals."""
TICK_S = 0.5
"""Interval at which the loop reports that it runs, and at which the thread checks this."""
ADVICE = "Run environments that compute in worker processes (workers = N on the environment)"
_LIBRARY_FOLDERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(headrace.__file__).parent))


async def measure_lag(interval_s: float, emit: Callable[[dict[str, float]], None]) -> None:
    """Call `emit` every `interval_s` seconds with the lag of the event loop since the last call; run until cancelled.

    Warnings about lag come at doubling lags, so a run that is always slow logs few.
    """
    warn_above = LAG_WARNING_S
    while True:
        lags = []
        end = time.monotonic() + interval_s
        while time.monotonic() < end:
            before = time.monotonic()
            await asyncio.sleep(LAG_PROBE_S)
            lags.append(time.monotonic() - before - LAG_PROBE_S)
        if max(lags) > warn_above:
            warn_above = 2 * max(lags)
            message = "the event loop was blocked for %.1f s by an environment, algorithm or filter. %s"
            log.warning(message, max(lags), ADVICE)
        quantiles = np.quantile(lags, [0.5, 0.9, 0.99, 1.0]).tolist()
        names = [f"event_loop_lag/{name}" for name in ("p50", "p90", "p99", "max")]
        emit(dict(zip(names, quantiles, strict=True)))


@asynccontextmanager
async def watch_loop(
    status: Status, warning_s: float = BLOCKED_WARNING_S, tick_s: float = TICK_S
) -> AsyncIterator[None]:
    """Report in the log and in the process status, while inside, which code blocks the event loop."""
    thread_id, last_tick, ended = threading.get_ident(), time.monotonic(), threading.Event()

    async def tick() -> None:
        nonlocal last_tick
        while True:
            last_tick = time.monotonic()
            await asyncio.sleep(tick_s)

    def watch() -> None:
        next_warning = warning_s
        while not ended.wait(tick_s):
            blocked = time.monotonic() - last_tick
            if blocked < warning_s:
                next_warning = warning_s
            elif blocked >= next_warning:
                next_warning = 2 * blocked
                where = location_of(sys._current_frames().get(thread_id))
                message = "the event loop has been blocked for %.0f s in %s: no episode advances. %s, and rewards that "
                log.warning(message + "may hang in a sandbox", blocked, where, ADVICE)
                status.set_problem(f"the event loop is blocked by {where}: no episode advances. {ADVICE}")

    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        ended.set()


def location_of(frame: FrameType | None) -> str:
    """Return function, file and line of the innermost frame outside of libraries; else of the innermost frame."""
    user = frame
    while user is not None and user.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        user = user.f_back
    shown = user or frame
    return f"{shown.f_code.co_name} ({shown.f_code.co_filename}, line {shown.f_lineno})" if shown else "unknown code"
