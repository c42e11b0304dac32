"""Start and shutdown of environments. One that hangs in either is named; one that does not close is abandoned.

Environments are user code: they may wait forever or ignore cancellation. `start` and `close` of each run as separate
tasks, so the caller can stop waiting for them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from headrace.environments.base import Environment
from headrace.observe.status import Status, wait_for

log = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 2.0
"""Time for cancelled tasks to end before the process exits without them."""
CLOSE_WARNING_S = 5.0
"""Time after which a warning names the environments that are still closing."""
CLOSE_TIMEOUT_S = 30.0


class EnvironmentLifecycle:
    """Starts environments one by one and closes them together. Their names appear in messages."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._started: dict[str, tuple[Environment, asyncio.Task[None]]] = {}

    async def start(self, name: str, environment: Environment) -> None:
        starting = asyncio.create_task(environment.start())
        self._started[name] = (environment, starting)
        await wait_for(starting, "readiness", name, self._status)

    async def close(self) -> None:
        """Close all environments at once, partly started ones included; raise the first of their errors."""

        async def close_one(environment: Environment, starting: asyncio.Task[None]) -> None:
            await asyncio.wait({starting})  # `wait_for` may have cancelled it
            await environment.close()

        closing = {asyncio.create_task(close_one(*started)): name for name, started in self._started.items()}
        key = self._status.begin_wait(f"the end of {', '.join(closing.values())}")
        try:
            await wait_until_closed(closing)
        finally:
            self._status.end_wait(key)


async def wait_until_closed(closing: Mapping[asyncio.Task[None], str]) -> None:
    """Wait at most `CLOSE_TIMEOUT_S` for tasks that close environments; raise the first of their errors.

    Environments that take longer are named and abandoned. SIGTERM and SIGINT end the wait.
    """

    def open_names() -> str:
        return ", ".join(name for task, name in closing.items() if not task.done())

    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    interrupt = asyncio.create_task(signalled.wait())
    waits: set[asyncio.Future[Any]] = {interrupt, asyncio.gather(*closing, return_exceptions=True)}
    done, _ = await asyncio.wait(waits, timeout=CLOSE_WARNING_S, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.warning("waiting at most %g s for %s to close; a signal ends the wait", CLOSE_TIMEOUT_S, open_names())
        timeout = CLOSE_TIMEOUT_S - CLOSE_WARNING_S
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    interrupt.cancel()
    if names := open_names():
        log.warning("%s did not close and is abandoned: check what its close() waits for", names)
    errors = [task.exception() for task in closing if task.done() and not task.cancelled()]
    for error in filter(None, errors):
        raise error


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop; abandon tasks that ignore their cancellation for `CANCEL_GRACE_S`.

    `asyncio.run` would wait for them without a limit.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_GRACE_S))
        if all(task.done() for task in tasks):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
