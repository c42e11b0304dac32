"""A user's function that is given so much time and no more, whether it is asynchronous or not.

One that is not runs in a thread, so that it holds up nobody, one call at a time, so that it need not be written for
threads. When its time is over it is interrupted at its next line of Python. A call that is stuck elsewhere, in a
library or asleep, cannot be ended: it is left behind, and after many such calls the function is not called any more
until one of them returns. Left out: processes, which could be killed; environments have workers for that.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MOST_STUCK = 16
"""Calls that are left behind before no more are made."""


class OutOfTime(Exception):
    """The call did not return in time, or was not made since earlier ones never returned."""


class _Abandoned(BaseException):
    """Raised in a thread whose result nobody waits for any more."""


class Limited:
    """`timeout` is in seconds; None for a function that has limits of its own."""

    def __init__(self, function: Callable[..., Any], timeout: float | None) -> None:
        self._function = function
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._stuck: list[threading.Thread] = []

    async def __call__(self, *args: Any) -> Any:
        """What it gives, or raises; `OutOfTime` if it takes too long. Waiting for its turn does not count."""
        if _is_async(self._function):
            return await self._in_time(self._function, args)
        async with self._turn:
            return await self._in_time(self._in_thread, args)

    async def _in_time(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                value = await function(*args)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if not limit.expired():
                raise  # its own
            raise OutOfTime(f"it took longer than {self._timeout:g} s") from error

    async def _in_thread(self, *args: Any) -> Any:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            raise OutOfTime(f"it is not called again, since {MOST_STUCK} earlier calls have still not returned")
        call = _Call(self._function, args)
        try:
            return await call.result()
        except asyncio.CancelledError:
            if call.abandon():
                self._stuck.append(call.thread)
            raise


class _Call:
    """One call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self._returned = False
        self._returning = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)  # a stuck one must not keep the process alive
        self.thread.start()

    async def result(self) -> Any:
        value, error = await self._outcome
        if error is not None:
            raise error
        return value

    def abandon(self) -> bool:
        """Interrupt it, if it has not returned. Python raises the exception before the thread's next line."""
        with self._returning:
            if not self._returned:
                ident = ctypes.c_ulong(self.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))
            return not self._returned

    def _run(self) -> None:
        value, error = None, None
        try:
            try:
                value = self._function(*self._args)
            except BaseException as raised:
                error = raised
            with self._returning:
                self._returned = True  # from here on nothing interrupts it
        except _Abandoned:  # just after the function had returned
            return
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result((value, error))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
