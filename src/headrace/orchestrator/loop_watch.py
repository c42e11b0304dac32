"""Says which code keeps the event loop from turning: a reward that computes for minutes holds up every episode.

From a thread, since the loop itself can say so only when it is over, which may be never.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import headrace
from headrace.observe.status import Status
from headrace.orchestrator.periodic import ADVICE

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds without a turn until it is said; then at growing intervals."""
TICK = 0.5
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(headrace.__file__).parent))
"""Whoever is to blame lies elsewhere, if anywhere."""


@asynccontextmanager
async def watching_the_loop(status: Status, patience: float = PATIENCE, tick: float = TICK) -> AsyncIterator[None]:
    """Inside, the status of the process names what the loop stands still for."""
    watch = _Watch(status, threading.get_ident(), patience)
    thread = threading.Thread(target=watch.run, args=(tick,), name="loop-watch", daemon=True)
    thread.start()
    ticking = asyncio.create_task(watch.tick(tick))
    try:
        yield
    finally:
        ticking.cancel()
        watch.ended.set()


class _Watch:
    def __init__(self, status: Status, thread_id: int, patience: float) -> None:
        self.ended = threading.Event()
        self._status, self._thread_id, self._patience = status, thread_id, patience
        self._turned_at = time.monotonic()

    async def tick(self, seconds: float) -> None:
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(seconds)

    def run(self, seconds: float) -> None:
        notice = self._patience
        while not self.ended.wait(seconds):
            held = time.monotonic() - self._turned_at
            if held < self._patience:
                notice = self._patience
            elif held >= notice:
                notice = 2 * held
                self._say(held)

    def _say(self, held: float) -> None:
        where = place_of(sys._current_frames().get(self._thread_id))
        log.warning(
            "the event loop has stood still for %.0f s in %s: no episode goes on. %s, and rewards that may hang into a "
            "sandbox",
            *(held, where, ADVICE),
        )
        self._status.set(f"held up by {where}, which has not let go of the event loop for {held:.0f} s")


def place_of(frame: FrameType | None) -> str:
    """In words, of the innermost frame that is of nobody's library; else of the innermost one."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "a place unknown"
    return f"{found.f_code.co_name} ({found.f_code.co_filename}, line {found.f_lineno})"
