"""Processes that run one function call at a time, and can be killed: for checkers that may never return.

Regular expressions, algebra and parsers can take for ever over an answer that a model made up, and some of them hold
the interpreter meanwhile, so that neither a thread nor a timer in the same process can end them. A process can be.

Left out: safety from code that wants to do harm. What runs here may read and write all that its user may.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from headrace.environments.channel import Channel
from headrace.environments.sandbox_process import (
    SCHEMA,
    Begin,
    Call,
    Import,
    Outcome,
    Raised,
    Request,
    kill_descendants,
    pack,
    unpack,
)
from headrace.environments.worker_process import how_it_ended, resident_mb

START_TIMEOUT = 120.0
"""Seconds to start a process, and to import a function there."""
GRACE = 1.0
"""Seconds that a process which has hung up may take to end by itself, so that its status tells why."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""One call at a time needs no more."""
PATIENCE = 10.0
"""For a checker that computes: how many times its limit it may take by the clock, while others use the processor."""
LOOK_AGAIN = 0.05
"""Seconds, at least, until the processor's time of a call is looked at again."""
PROGRAM = "from headrace.environments.sandbox_process import main; main()"


class CallTimeout(Exception):
    """The call took longer than its time; its process was killed."""


class CallFailed(Exception):
    """The function raised, with `kind` the exception's type, or its process died, and `kind` is "process".

    `kind` is "start" if no process could be had, or the function could not be made ready in it, and "closed" if the
    sandbox was closed meanwhile: neither is the call's own doing.
    """

    def __init__(self, kind: str, text: str, remote_traceback: str = "") -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.remote_traceback = remote_traceback


class Sandbox:
    """At most `processes` of them, started when they are needed. For use in one event loop at a time.

    `memory_mb` is what each of them may write to, where the system holds that limit; a call that wants more fails.
    After `close` the next call starts anew.
    """

    def __init__(self, processes: int = 2, memory_mb: int | None = 2048) -> None:
        if processes < 1:
            raise ValueError(f"a sandbox needs at least one process, not {processes}")
        self._size = processes
        self._memory_mb = memory_mb
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(processes)
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []

    async def call(self, function: str, *args: Any, timeout: float, patience: float = 1.0) -> Any:
        """Call `package.module:name` in a process of its own. Arguments and result are JSON values or bytes.

        `timeout` is the call's own: waiting for a free process, its start and its imports do not count. With `patience`
        above 1, a call that has not used that much of the processor yet, because others do, goes on for up to
        `patience` times its timeout, where the system tells what a process has used. A cancelled call ends as one that
        takes too long: its process is killed, with all that it has started.
        """
        try:
            arguments = pack(args)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CallFailed(type(error).__name__, f"an argument of {function} cannot be passed on: {error}") from error
        self._enter_loop()
        places = self._places
        async with places:
            if places is not self._places:
                raise CallFailed("closed", "the sandbox was closed")
            process = await self._free_process()
            try:
                return await process.call(function, arguments, timeout, patience)
            finally:
                self._put_back(process)

    async def close(self) -> None:
        """End all processes; calls that still wait fail."""
        self._places = asyncio.Semaphore(self._size)
        processes, self._processes, self._idle = self._processes, [], []
        for process in processes:
            process.kill("was ended: the sandbox was closed", kind="closed")
        await asyncio.gather(*(process.ended() for process in processes))

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            for process in self._processes:  # of an event loop that ended without close()
                process.kill("was ended: its event loop is gone")
            self._processes, self._idle = [], []
            self._places = asyncio.Semaphore(self._size)
            self._loop = loop

    async def _free_process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            process.kill("ended while it had nothing to do")
        self._processes = [process for process in self._processes if not process.is_buried()]
        process = _Process(self._memory_mb)
        self._processes.append(process)
        await process.start()
        return process

    def _put_back(self, process: _Process) -> None:
        if process in self._processes and process.is_alive():
            self._idle.append(process)


class _Process:
    """One process, from its start to its end. It is asked one thing at a time; whatever interrupts that kills it."""

    def __init__(self, memory_mb: int | None) -> None:
        self._memory_mb = memory_mb
        self._functions: set[str] = set()
        self._killed = False
        self._lost = False
        self._cause = ""
        self._kind = "process"
        self._outcome: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        """Of what it was asked last; None if it hung up instead."""
        self._channel = Channel(Outcome, self._settle, self._lose)
        self._ours, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(watched)],
                pass_fds=(theirs.fileno(), watched),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,  # so that it can be killed with whatever it has started
            )
        except OSError as error:
            self._ours.close()
            os.close(self._lifeline)
            raise CallFailed("start", f"no process could be started: {error}") from error
        finally:
            theirs.close()
            os.close(watched)

    async def start(self) -> None:
        try:
            await self._channel.open(self._ours)
        except BaseException:
            self.kill("could not be reached")
            raise
        await self._prepare(Begin(SCHEMA, sys.path, self._memory_mb))

    async def call(self, function: str, arguments: bytes, timeout: float, patience: float) -> Any:
        if function not in self._functions:
            await self._prepare(Import(function))
            self._functions.add(function)
        outcome = await self._ask(Call(function, msgspec.Raw(arguments)), timeout, patience)
        if outcome is None:
            raise CallTimeout(f"{function} took longer than {timeout:g} s")
        return self._result(outcome)

    def is_alive(self) -> bool:
        return not self._killed and not self._lost and self._process.poll() is None

    def is_buried(self) -> bool:
        return self._killed and self._process.poll() is not None

    def kill(self, cause: str, kind: str = "process") -> None:
        """End it with all that it has started. A call that waits for it fails for this cause."""
        if self._killed:
            return
        self._killed = True
        self._cause, self._kind = cause, kind
        kill_descendants(self._process.pid)  # those that have left its group
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in its group; macOS says so with EPERM
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._lifeline)
        if not self._outcome.get_loop().is_closed():
            self._channel.abort()

    async def ended(self) -> None:
        await asyncio.to_thread(self._process.wait)

    async def _prepare(self, request: Begin | Import) -> None:
        outcome = await self._ask(request, START_TIMEOUT)
        if outcome is None:
            what = "start" if isinstance(request, Begin) else f"import {request.function}"
            raise CallFailed("start", f"the process did not {what} within {START_TIMEOUT:g} s")
        self._result(outcome)

    async def _ask(self, request: Request, timeout: float, patience: float = 1.0) -> Outcome | None:
        """The answer, or None if it did not come in time."""
        self._outcome = asyncio.get_running_loop().create_future()
        try:
            if not self._lost:
                self._channel.send(request)
                if not await self._in_time(timeout, patience):
                    self.kill("was killed: it took too long")
                    return None
            outcome = None if self._lost else self._outcome.result()
            if outcome is None:
                how = await self._end()
                ready = self._kind != "process" or isinstance(request, Call)
                raise CallFailed(self._kind if ready else "start", f"the process {how}")
        except BaseException:
            self.kill("was killed: its call was cancelled")
            raise
        return outcome

    async def _in_time(self, timeout: float, patience: float) -> bool:
        """Whether the answer comes before the call has used `timeout` seconds, of the processor's time or in all."""
        clock = asyncio.get_running_loop().time
        began, used_before = clock(), self._processor_seconds()
        left = timeout
        while left > 0:
            # unlike asyncio.timeout, this takes an answer that came while the event loop was busy elsewhere
            if (await asyncio.wait({self._outcome}, timeout=left))[0]:
                return True
            unused = timeout - (self._processor_seconds() - used_before)
            left = min(began + patience * timeout - clock(), max(unused, LOOK_AGAIN) if unused > 0 else 0.0)
        return False

    def _processor_seconds(self) -> float:
        """What it has used so far; where the system does not tell, the time by the clock."""
        if sys.platform == "linux":
            with suppress(OSError):  # it has just ended
                return time.clock_gettime(~self._process.pid << 3 | 2)  # how Linux numbers the clocks of processes
        return time.monotonic()

    def _result(self, outcome: Outcome) -> Any:
        if isinstance(outcome, Raised):
            if outcome.kind == "MemoryError" and resident_mb(self._process.pid) > (self._memory_mb or 0) / 2:
                self.kill("was killed: it has no memory left")  # what it still holds now, the next call would miss
            raise CallFailed(outcome.kind, outcome.text, outcome.traceback)
        try:
            return unpack(outcome.value)
        except ValueError as error:
            raise CallFailed(type(error).__name__, str(error)) from error

    def _settle(self, outcome: Outcome | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _lose(self) -> None:
        self._lost = True
        self._settle(None)

    async def _end(self) -> str:
        """How it ended, or was ended."""
        if not self._killed:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, GRACE)
            status = self._process.returncode
            self.kill("hung up" if status is None else how_it_ended(status))
        return self._cause
