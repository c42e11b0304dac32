"""An event loop whose clock jumps to the next event, so that an hour of waiting takes no time.

Inside `virtual_time(loop)` the clocks of the `time` module follow the loop and `time.sleep` lets the loop run, so
blocking code (the launcher) and asynchronous code (all other processes) share one simulated time. Work for threads runs
at once.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

START_S = 1000.0
WALL_CLOCK_S = 1_700_000_000.0
"""What the wall clock shows at time 0."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for sockets, sets the loop's clock forward."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `now` is its time in seconds."""

    def __init__(self) -> None:
        self.now = START_S
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def advance(self, seconds: float) -> None:
        """Run everything that happens within the next `seconds`."""
        self.call_later(max(0.0, seconds), self.stop)
        self.run_forever()


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    clocks = mock.patch.multiple(time, monotonic=loop.time, time=lambda: WALL_CLOCK_S + loop.now, sleep=loop.advance)
    with clocks:
        try:
            yield
        finally:
            _end_all(loop)


def _end_all(loop: VirtualLoop) -> None:
    """Cancel what still runs, and let it end."""
    for _ in range(3):
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.advance(60.0)
    loop.close()
