"""Simulated processes, and the node agents that start them for the real registry of hosts.

A process is a coroutine. Killing it cancels its tasks, and what it had not written to the disk is never written.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from headrace.launch.node_messages import (
    LEASE_S,
    Command,
    Dial,
    Join,
    Kill,
    ProcessState,
    Report,
    Signal,
    Start,
    Stop,
)
from headrace.launch.node_registry import LeaseLost, NameInUse, Node, NodeRegistry
from headrace.observe.status import Status
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.simulation.network import SimulatedHost

if TYPE_CHECKING:
    from tests.simulation.world import World

REPORT_S = 1.0
"""Seconds between two reports of a host to the launcher."""
WRITE_S = 0.01
"""Mean time that a write takes."""

current: ContextVar[SimulatedProcess] = ContextVar("current")
"""The process whose code runs."""


class Killed(BaseException):
    """The process was killed at this point."""


class SimulatedProcess:
    """A process of the real command line `argv`, whose work is a coroutine."""

    _pids = itertools.count(1000)

    def __init__(self, world: World, host: SimulatedHost, name: str, argv: Sequence[str]) -> None:
        self.world, self.host, self.name = world, host, name
        self.program = argv[argv.index("headrace") + 1]
        self.node_rank = int(argv[argv.index("--node-rank") + 1]) if "--node-rank" in argv else 0
        self.nodes = int(argv[argv.index("--nodes") + 1]) if "--nodes" in argv else 1
        self.pid = next(self._pids)
        self.alive = True
        self.is_up = False
        self.exit_status: int | None = None
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """In order, so that a seed gives the same run again."""
        self.dies_in_write = ""
        """Where in the next write of the journal it is killed: `before` or `after` the commit."""
        self.on_end: list[Callable[[], None]] = []
        """What the kernel does when it ends."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        token = current.set(self)
        task = self.world.loop.create_task(work)
        current.reset(token)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self.alive:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.world.errors.append("".join(traceback.format_exception(error)))
            self.end(1 if error or task.cancelled() else 0)

    def end(self, status: int) -> None:
        if not self.alive:
            return
        self.alive, self.exit_status = False, status
        for action in self.on_end:
            action()
        for task in list(self.tasks):
            task.cancel()


class SimulatedDriver:
    """The driver without its HTTP server: the registry of hosts, whose agents call it."""

    def __init__(self, world: World) -> None:
        self.run, self.env = world.run, {}
        self.nodes = NodeRegistry()
        self.refusals: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.notify = world.view.say

    @contextmanager
    def locked(self) -> Iterator[NodeRegistry]:
        for node in self.nodes.expire(time.monotonic()):
            self.notify(f"host {node.name} is lost")
        yield self.nodes

    def send(self, node: Node, command: Command) -> None:
        node.send(command)


class NodeAgent:
    """What `headrace node` does: renew the lease, start and end processes; without a lease, kill them and rejoin."""

    def __init__(self, world: World, host: SimulatedHost) -> None:
        self._world, self._host = world, host
        self._joins, self._ports = itertools.count(), itertools.count(20000)
        self._nonce, self._done, self._renewed_at = "", 0, 0.0
        self._processes: dict[int, SimulatedProcess] = {}
        self._dialed: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            now = self._world.loop.time()
            if not self._host.up or (self._nonce and now - self._renewed_at > LEASE_S):
                self._kill_all()
                self._nonce = ""
            if self._host.answers(now):
                try:
                    self._report(now)
                except LeaseLost:
                    self._kill_all()
                    self._nonce = ""
            await asyncio.sleep(REPORT_S)

    def _report(self, now: float) -> None:
        driver, host = self._world.driver, self._host
        if not self._nonce:
            nonce = f"{host.name}-{next(self._joins)}"
            facts = Join(nonce, host.name, 1, host.gpus, 64, sys.executable, {}, now, role=host.role)
            try:
                driver.nodes.join(host.name, facts, now)
            except NameInUse:  # until the lease of the last join has expired
                return
            self._nonce, self._done, self._dialed = nonce, 0, {}
        states = {number: ProcessState(p.pid, p.exit_status) for number, p in self._processes.items()}
        node = driver.nodes.report(
            host.name, Report(self._nonce, self._done, states, self._dialed, [next(self._ports)]), now
        )
        self._renewed_at = now
        for number, command in list(node.commands):
            self._done = number
            match command:
                case Start():
                    self._start(command)
                case Signal(process=process, number=signum):
                    self._processes[process].end(-signum)
                case Kill(process=process):
                    self._processes[process].end(-signal.SIGKILL)
                case Dial(nonce=nonce):
                    self._dialed[nonce] = ""
                case Stop():
                    self._kill_all()

    def _start(self, command: Start) -> None:
        process = SimulatedProcess(self._world, self._host, command.name, command.argv)
        self._world.processes[command.name] = self._processes[command.process] = process
        process.run(self._world.programs[process.program](process))

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.end(-signal.SIGKILL)
        self._processes.clear()


class SimulatedDisk(Executor):
    """The disk thread of a process: one write after the other, none after its end."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._process = current.get()
        self._free_at = 0.0

    def submit(self, work: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        world = self._process.world
        self._free_at = max(self._free_at, world.loop.time()) + world.rng.expovariate(1 / WRITE_S)
        world.loop.call_at(self._free_at, self._write, work)

    def _write(self, work: Callable[[], None]) -> None:
        if self._process.alive:
            work()

    def shutdown(self, *args: object, **kwargs: object) -> None:
        """Do nothing: what was submitted is written in its time."""


class SimulatedStatus(Status):
    """A status file without a thread that writes it."""

    def __init__(self, run: RunDir, process: SimulatedProcess) -> None:
        self._process = process
        super().__init__(run.status, process.name)
        self.current.pid = process.pid

    def _beat(self) -> None:
        """Do nothing."""

    def _write(self) -> None:
        if self._process.alive:
            super()._write()


def kill_in_commits(process: SimulatedProcess, journal: Journal) -> None:
    """Let the process be killed right before or right after a commit, if it is to be; its end closes the journal."""
    commit = journal.commit

    def die() -> None:
        process.end(-signal.SIGKILL)
        raise Killed

    def commit_or_die(*args: Any, **kwargs: Any) -> None:
        if process.dies_in_write == "before":
            die()
        commit(*args, **kwargs)
        if process.dies_in_write == "after":
            die()

    journal.commit = commit_or_die  # type: ignore[method-assign]
    process.on_end.append(journal.close)
