"""A heartbeat of the event loop: it stops when something holds the loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def ticks_during(work: Awaitable[T]) -> tuple[T, int]:
    """The result, and how often the event loop came round meanwhile, at most once in a millisecond."""
    task = asyncio.ensure_future(work)
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    return task.result(), ticks
