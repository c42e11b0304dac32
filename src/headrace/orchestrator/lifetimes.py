"""The environments of a run, from start to close. One that hangs in either is named; in closing it is given up.

An environment is written by users, and may wait for what never comes, or ignore its cancellation. Both calls are tasks
of their own, so that whoever waits for them can stop waiting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from headrace.environments.base import Environment
from headrace.observe.status import Status, wait_for

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE = 2.0
"""Seconds for what has been left behind to end before the process ends without it."""
FIRST_WORD = 5.0
PATIENCE = 30.0
"""Seconds of closing after which it is said who takes so long, and after which they are given up."""


class Lifetimes:
    """Names are for people."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._started: dict[str, tuple[Environment, asyncio.Task[None]]] = {}

    async def start(self, name: str, environment: Environment) -> None:
        starting = asyncio.create_task(environment.start())
        self._started[name] = (environment, starting)
        await wait_for(starting, "readiness", name, self._status)

    async def close(self) -> None:
        """Close them all at once, also those that are half started; raises what one of them raised."""
        ending = {asyncio.create_task(_end(*started)): name for name, started in self._started.items()}
        shown = self._status.begin_wait(f"the end of {_named(ending.values())}")
        try:
            await wait_until_closed(ending)
        finally:
            self._status.end_wait(shown)


async def wait_until_closed(ending: Mapping[asyncio.Task[None], str]) -> None:
    """Wait for tasks that close environments, `PATIENCE` seconds at most; raises what one of them raised.

    Those that take longer are named and left behind. From now on SIGTERM and SIGINT end the wait.
    """
    hurry = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, hurry.set)
    hurried = asyncio.create_task(hurry.wait())
    waits: set[asyncio.Future[Any]] = {hurried, asyncio.gather(*ending, return_exceptions=True)}
    done, _ = await asyncio.wait(waits, timeout=FIRST_WORD, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.warning("waiting until %s has closed, %g s at most; a signal ends that", _left(ending), PATIENCE)
        await asyncio.wait(waits, timeout=PATIENCE - FIRST_WORD, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if left := _left(ending):
        log.warning("%s has not closed, and is left behind: look at what its close() waits for", left)
    errors = [task.exception() for task in ending if task.done() and not task.cancelled()]
    for error in filter(None, errors):
        raise error


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own; what ignores its cancellation is left behind after `GRACE` seconds.

    `asyncio.run` would wait for it without a limit.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
        if not any(not task.done() for task in left):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _end(environment: Environment, starting: asyncio.Task[None]) -> None:
    await asyncio.wait({starting})  # if it is not done, whoever has stopped waiting for it has cancelled it
    await environment.close()


def _left(ending: Mapping[asyncio.Task[None], str]) -> str:
    return _named(name for task, name in ending.items() if not task.done())


def _named(names: Iterable[str]) -> str:
    return ", ".join(names)
