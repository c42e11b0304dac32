"""Checked reads of published directories, their time limit, and the errors of weight updates; without torch.

A mount whose server is gone blocks a read for good. A read that takes longer than the limit is left behind in its
thread, and what it returns later is released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import Failure
from headrace.rollout.schema import SchemaError
from headrace.rollout.version import Version
from headrace.transport.files import in_daemon_thread
from headrace.transport.weights import WeightsMarker, checksum, read_marker

T = TypeVar("T")

MAX_NAMES = 3
"""Tensors that an error message names."""
READ_TIMEOUT_S = 540.0
"""The default of `inference.http.admin_timeout`."""


class WeightsError(Failure):
    """A published directory cannot become the engine's weights; the model is unchanged."""


class WeightsUnreachable(WeightsError):
    """A version did not arrive: its trainer is gone, silent or has a newer one, or the bytes are damaged.

    The model is unchanged, and a retry may succeed.
    """


def abbreviate(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def read_checked_marker(directory: Path, version: Version) -> WeightsMarker:
    """Read the marker of a published directory; raises `WeightsError` unless it is complete and of this version."""
    try:
        marker = read_marker(directory)
    except (OSError, SchemaError) as error:
        raise WeightsError(str(error)) from error
    if marker.version != version:
        raise WeightsError(f"{directory} has version {marker.version}, but version {version} was requested")
    return marker


def check_digest(directory: Path, expected: str) -> str:
    """Return the checksum of a directory's files; raises `WeightsError` if it is not the expected one."""
    try:
        actual = checksum(directory)
    except OSError as error:  # e.g. the version was retired meanwhile
        raise WeightsError(str(error)) from error
    if actual != expected:
        raise WeightsError(f"{directory} is damaged: its files have checksum {actual}, not {expected}")
    return actual


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
            release_when_done(reading)
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


def release_when_done(reading: Future[Any]) -> None:
    """Release what a thread returns although it is no longer waited for."""

    def release(done: Future[Any]) -> None:
        if done.exception() is None and hasattr(result := done.result(), "release"):
            result.release()

    reading.add_done_callback(release)
