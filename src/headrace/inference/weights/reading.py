"""Reads of published directories and adapters with a time limit: a mount whose server is gone blocks them for good.

A read that takes longer is left behind in its thread, and what it returns later is released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from headrace.inference.weights.errors import WeightsUnreachable
from headrace.transport.files import in_daemon_thread

T = TypeVar("T")

READ_TIMEOUT_S = 540.0
"""The default of `inference.http.admin_timeout`."""


class DirectoryReader:
    """Calls functions that read a directory, each for at most `timeout_s`. Raises `WeightsUnreachable`."""

    def __init__(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    def read(self, directory: Path, function: Callable[[], T], deadline: float | None = None) -> T:
        """Return the function's result; `deadline`, of the monotonic clock, counts time that has passed before."""
        seconds = self.timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        reading = in_daemon_thread(function)
        try:
            return reading.result(seconds)
        except TimeoutError as error:
            if reading.done():
                raise
            reading.add_done_callback(_release_late)
            raise self.unreachable(directory) from error

    async def read_async(self, directory: Path, function: Callable[[], T]) -> T:
        """The same without blocking the event loop."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.wrap_future(in_daemon_thread(function))
        except TimeoutError as error:
            raise self.unreachable(directory) from error

    def unreachable(self, directory: Path) -> WeightsUnreachable:
        return WeightsUnreachable(
            f"{directory}: not read within {self.timeout_s:g} s (inference.http.admin_timeout). Check that its file "
            "system responds."
        )


def _release_late(reading: Future[Any]) -> None:
    if reading.exception() is None and hasattr(result := reading.result(), "release"):
        result.release()
