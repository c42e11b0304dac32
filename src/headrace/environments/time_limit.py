"""A time limit for a user's function, synchronous or not.

A synchronous function runs in a thread, so that it does not block the event loop, one call at a time, so that it need
not be thread-safe. After its time limit it is interrupted at its next line of Python. A call that is stuck elsewhere,
in a library or asleep, cannot be interrupted: its thread is abandoned, and after many such calls the function is not
called any more until one of them returns. Left out: processes, which could be killed; environments have workers.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

MAX_STUCK_CALLS = 16
"""Abandoned calls after which no more are made."""


class OutOfTime(Exception):
    """A call that did not return in time, or was not made since earlier ones never returned."""


class _Abandoned(BaseException):
    """Raised in the thread of an abandoned call."""


class LimitedFunction:
    """A function with a time limit of `timeout` seconds; None for a function that has its own limits.

    Without `in_thread` a synchronous function is called in the event loop, where it cannot be interrupted.
    """

    def __init__(self, function: Callable[..., Any], timeout: float | None, in_thread: bool = True) -> None:
        self._function = function
        self._timeout = timeout
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._in_thread = in_thread and not is_async
        self._lock = asyncio.Lock()
        self._stuck: list[threading.Thread] = []

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns; raise `OutOfTime` after `timeout` seconds, not counting the queue."""
        call = partial(self._function, *args, **kwargs)
        if not self._in_thread:
            return await self._within_timeout(call)
        async with self._lock:
            return await self._within_timeout(call)

    async def _within_timeout(self, function: Callable[[], Any]) -> Any:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                value = await self._call_in_thread(function) if self._in_thread else function()
                return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if not limit.expired():
                raise  # raised by the function itself
            raise OutOfTime(f"it took longer than {self._timeout:g} s") from error

    async def _call_in_thread(self, function: Callable[[], Any]) -> Any:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MAX_STUCK_CALLS:
            raise OutOfTime(f"it is not called again, since {MAX_STUCK_CALLS} earlier calls have still not returned")
        call = ThreadCall(function)
        try:
            return await call.result()
        except asyncio.CancelledError:
            if call.abandon():
                self._stuck.append(call.thread)
            raise


class ThreadCall:
    """One call in a thread of its own, so that hundreds run at once: the loop's default executor has few threads."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self._returned = False
        self._returning = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)  # a stuck thread must not keep the process alive
        self.thread.start()

    async def result(self) -> Any:
        """Return the function's value, or raise its exception, sys.exit() included."""
        value, error = await self._outcome
        if error is not None:
            raise error
        return value

    def abandon(self) -> bool:
        """Interrupt the call, unless it has returned. Python raises the exception before the thread's next line."""
        with self._returning:
            if not self._returned:
                ident = ctypes.c_ulong(self.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))
            return not self._returned

    def _run(self) -> None:
        value, error = None, None
        try:
            try:
                value = self._context.run(self._function)
            except BaseException as raised:
                error = raised
            with self._returning:
                self._returned = True  # `abandon` no longer interrupts the thread
        except _Abandoned:  # `abandon` was called just after the function had returned
            return
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._set_outcome, value, error)

    def _set_outcome(self, value: Any, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result((value, error))
