"""Processes that run one function call at a time and can be killed, for checkers that may never return.

Regular expressions, algebra and parsers can run forever on an answer that a model made up, and some of them hold the
interpreter meanwhile, so that neither a thread nor a timer in the same process can end them.

A process is a plain loop over calls, whose method is the import path of a function, so that a function may start an
event loop of its own. This is no security boundary: the function may read and write all that its user may, and leave
anything behind for the next call. It is for checkers, which only read what a model wrote.

A sandbox of `untrusted` functions is for those that execute what a model wrote. Its processes run inside bubblewrap
(`isolation.py`), or have what its fallback has, and every call has a forked process of its own there: it can change
its own result and nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import headrace
from headrace.environments import child_process, isolation, sandbox_process
from headrace.environments.channel import Channel, Failed, Outcome
from headrace.environments.code_runner import kill_descendants, measure_descendants
from headrace.environments.sandbox_process import SCHEMA, Limits, pack, unpack

START_TIMEOUT_S = 120.0
"""Limit for starting a process, and for importing a function in it."""
EXIT_TIMEOUT_S = 1.0
"""A process that has closed its socket has this long to exit, so that its exit status can be reported."""
WALL_FACTOR = 10.0
"""The `wall_factor` of checkers that compute: other processes may use the CPU meanwhile."""
MIN_CPU_POLL_S = 0.05
"""The shortest interval between two readings of a call's CPU time."""
PACKAGE = Path(headrace.__file__).parent
PROGRAM = f"import sys; sys.path[:] = {{path!r}}; from {sandbox_process.__name__} import main; main()"
LIBRARIES = ("site-packages", "dist-packages")
"""Folders on the path that untrusted functions can read."""
DISK_MB, WORKER_MB = 64, 256
"""Limits for untrusted functions: their files, and the memory of the process that they are forked from."""


class CallTimeout(Exception):
    """The call exceeded its timeout; its process was killed."""


class CallFailed(Exception):
    """The function raised, and `kind` is the exception's type, or its process died, and `kind` is "process".

    `kind` is "start" if no process could be started or the function could not be imported, and "closed" if the sandbox
    was closed meanwhile: neither is the call's fault.
    """

    def __init__(self, kind: str, text: str, remote_traceback: str = "") -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.remote_traceback = remote_traceback


class Sandbox:
    """A pool of at most `processes` processes, started on demand. For use in one event loop at a time.

    `memory_mb` limits the written memory of each process, where the system enforces that; a call that needs more fails.
    With `untrusted` the functions execute what a model wrote; `modules` are the modules that they are in, which are
    readable there besides Headrace and installed libraries. After `close` the next call starts new processes.
    """

    def __init__(
        self, processes: int = 2, memory_mb: int | None = 2048, *, untrusted: bool = False, modules: Sequence[str] = ()
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes = {processes}: a sandbox needs at least one process")
        self._size = processes
        self._memory_mb = memory_mb
        self._limits = _untrusted_limits(memory_mb) if untrusted else None
        self._modules = modules
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(processes)
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []

    async def call(self, function: str, *args: Any, timeout: float, wall_factor: float = 1.0) -> Any:
        """Call `package.module:name` in a process and return its result. Arguments and result are JSON values or bytes.

        Waiting for a free process, its start and its imports do not count towards `timeout` (seconds). Where the system
        reports CPU time, `timeout` is CPU time, and `wall_factor` times `timeout` the limit by the clock. When a
        call times out or is cancelled, its process is killed with all that it has started.
        """
        try:
            arguments = pack(args)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CallFailed(type(error).__name__, f"an argument of {function} cannot be passed on: {error}") from error
        self._enter_loop()
        slots = self._slots
        async with slots:
            if slots is not self._slots:
                raise CallFailed("closed", "the sandbox was closed")
            process = await self._free_process()
            try:
                return await process.call(function, arguments, timeout, wall_factor)
            finally:
                if process in self._processes and process.is_alive():
                    self._idle.append(process)

    async def close(self) -> None:
        """End all processes; calls that still wait fail."""
        self._slots = asyncio.Semaphore(self._size)
        processes, self._processes, self._idle = self._processes, [], []
        for process in processes:
            process.kill("was ended: the sandbox was closed", kind="closed")
        await asyncio.gather(*(process.ended() for process in processes))

    def _enter_loop(self) -> None:
        """Drop the processes of an earlier event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            for process in self._processes:  # that loop ended without close()
                process.kill("was ended: its event loop is gone")
            self._processes, self._idle = [], []
            self._slots = asyncio.Semaphore(self._size)
            self._loop = loop

    async def _free_process(self) -> _Process:
        """Return an idle process, or start one."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            process.kill("ended while it was idle")
        for process in self._processes:
            if not process.is_running():
                process.remove_group()
        self._processes = [process for process in self._processes if process.is_running()]
        process = _Process(self._memory_mb, self._limits, self._modules)
        self._processes.append(process)
        await process.start()
        return process


class _Process:
    """One process, from its start to its end. It executes one call at a time; an interrupted call kills it."""

    def __init__(self, memory_mb: int | None, limits: Limits | None, modules: Sequence[str]) -> None:
        self._memory_mb = memory_mb
        self._limits = limits
        self._group: isolation.Cgroup | None = None
        self._functions: set[str] = set()
        self._killed = False
        self._lost = False
        self._cause = ""
        self._kind = "process"
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(self._connection_lost)
        try:
            with child_process.connect_to_child() as (self._socket, self._lifeline, descriptors):
                command = [sys.executable, "-c", PROGRAM.format(path=sys.path), *map(str, descriptors)]
                self._process = subprocess.Popen(
                    command if limits is None else self._confine(command, limits, modules),
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **child_process.ONE_THREAD},
                    start_new_session=True,  # so that it can be killed with all that it has started
                )
        except OSError as error:
            raise CallFailed("start", f"no process could be started: {error}") from error

    def _confine(self, command: list[str], limits: Limits, modules: Sequence[str]) -> list[str]:
        """Return the command line of a process for untrusted functions, and complete its limits."""
        self._limits = {**limits, **isolation.choose_users(contained=limits["contained"])}
        if not limits["contained"]:
            return command
        libraries = [path for path in sys.path if Path(path).name in LIBRARIES and os.path.isdir(path)]
        files = {str(path): str(path) for path in (PACKAGE, *libraries, *map(_find_module_files, modules))}
        command = isolation.bubblewrap_command(command, files, user=self._limits["user"], disk_mb=limits["disk_mb"])
        self._group = isolation.make_cgroup(
            limits["memory_mb"] + 2 * limits["disk_mb"] + WORKER_MB, limits["processes"]
        )
        return command if self._group is None else self._group.command(command)

    async def start(self) -> None:
        try:
            await self._channel.open(self._socket)
        except BaseException:
            self.kill("could not be connected to")
            raise
        setup = SCHEMA, self._memory_mb, self._limits
        await self._prepare("start", f"{sandbox_process.__name__}:apply_limits", setup)

    async def call(self, function: str, arguments: bytes, timeout: float, wall_factor: float) -> Any:
        if function not in self._functions:
            await self._prepare(f"import {function}", f"{sandbox_process.__name__}:prepare", (function,))
            self._functions.add(function)
        outcome = await self._request(function, arguments, timeout, wall_factor)
        if outcome is None:
            raise CallTimeout(f"{function} took longer than {timeout:g} s")
        return self._unpack_outcome(outcome)

    def is_alive(self) -> bool:
        return not self._killed and not self._lost and self._process.poll() is None

    def is_running(self) -> bool:
        """Return whether the process exists, even if it has been killed."""
        return not self._killed or self._process.poll() is None

    def kill(self, cause: str, kind: str = "process") -> None:
        """Kill the process with all that it has started. A pending call fails with this cause and kind."""
        if self._killed:
            return
        self._killed = True
        self._cause, self._kind = cause, kind
        kill_descendants(self._process.pid)  # also those that have left its process group
        child_process.kill_group(self._process.pid)
        os.close(self._lifeline)
        if not self._loop.is_closed():
            self._channel.abort()

    async def ended(self) -> None:
        await asyncio.to_thread(self._process.wait)
        self.remove_group()

    def remove_group(self) -> None:
        """Remove the cgroup of the process, after its end."""
        if self._group is not None:
            self._group.remove()

    async def _prepare(self, what: str, function: str, arguments: tuple[Any, ...]) -> None:
        outcome = await self._request(function, pack(arguments), START_TIMEOUT_S, failure_kind="start")
        if outcome is None:
            raise CallFailed("start", f"the process did not {what} within {START_TIMEOUT_S:g} s")
        self._unpack_outcome(outcome)

    async def _request(
        self, function: str, arguments: bytes, timeout: float, wall_factor: float = 1.0, failure_kind: str = "process"
    ) -> Outcome | None:
        """Return the outcome; None after a timeout. A process that ends raises `CallFailed` with `failure_kind`."""
        try:
            if not self._lost:
                _, outcome = self._channel.call(function, arguments)
                if not await self._wait_in_time(outcome, timeout, wall_factor):
                    self.kill("was killed: it took too long")
                    return None
                if not outcome.cancelled():
                    return outcome.result()
            cause = await self._wait_for_exit()
            raise CallFailed(failure_kind if self._kind == "process" else self._kind, f"the process {cause}")
        except BaseException:
            self.kill("was killed: its call was cancelled")
            raise

    async def _wait_in_time(self, outcome: asyncio.Future[Outcome], timeout: float, wall_factor: float) -> bool:
        """Return whether the outcome arrives before the call has used `timeout` seconds of CPU time."""
        start, cpu_start = self._loop.time(), self._cpu_seconds()
        left = timeout
        while left > 0:
            # Unlike asyncio.timeout, asyncio.wait accepts an outcome that arrived while the event loop was busy.
            if (await asyncio.wait({outcome}, timeout=left))[0]:
                return True
            unused = timeout - (self._cpu_seconds() - cpu_start)
            remaining = start + wall_factor * timeout - self._loop.time()
            left = min(remaining, max(unused, MIN_CPU_POLL_S) if unused > 0 else 0.0)
        return False

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the process so far; wall-clock time where the system does not report it."""
        if sys.platform == "linux" and self._limits is not None:
            return measure_descendants(self._process.pid).cpu_s  # each call has its own process
        if sys.platform == "linux":
            with suppress(OSError):  # the process has just ended
                return time.clock_gettime(~self._process.pid << 3 | 2)  # Linux's clock id of a process
        return time.monotonic()

    def _unpack_outcome(self, outcome: Outcome) -> Any:
        """Return the result of a call; raise `CallFailed` if the function raised."""
        if isinstance(outcome, Failed):
            fault = outcome.fault
            used_mb = child_process.resident_mb(self._process.pid)
            if fault.kind == "MemoryError" and self._limits is None and used_mb > (self._memory_mb or 0) / 2:
                self.kill("was killed: it has no memory left")  # else the next call lacks memory
            raise CallFailed(fault.kind, fault.message, fault.traceback)
        try:
            return unpack(outcome.value)
        except (ValueError, RecursionError) as error:
            raise CallFailed(type(error).__name__, str(error)) from error

    def _connection_lost(self) -> None:
        self._lost = True
        for outcome in self._channel.pending.values():
            outcome.cancel()

    async def _wait_for_exit(self) -> str:
        """Return how the process ended or was killed."""
        if not self._killed:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, EXIT_TIMEOUT_S)
            status = self._process.returncode
            self.kill("closed its socket" if status is None else child_process.describe_exit(status))
        return self._cause


def _untrusted_limits(memory_mb: int | None) -> Limits:
    settings = isolation.current_settings()
    return {
        "memory_mb": min(memory_mb or settings.memory_mb, settings.memory_mb),
        "disk_mb": DISK_MB,
        "processes": settings.processes,
        "timeout": settings.cpu_s,
        "max_output": settings.output_mb << 20,
        "contained": isolation.register_untrusted("function"),
        "filter": isolation.filter_hex(),
    }


def _find_module_files(module: str) -> Path:
    """Return the folder of the package that a module is in, or its file if it is in none."""
    name = module.partition(".")[0]
    spec = importlib.util.find_spec(name)
    locations = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
    if not locations or not os.path.exists(locations[0]):
        raise CallFailed("start", f"module {name} has no files")
    return Path(locations[0])
