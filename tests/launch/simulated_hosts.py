"""Hosts and processes that exist only in this process, on a clock that jumps: hours of supervision in a moment."""

from __future__ import annotations

import heapq
import itertools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.launch.hosts.base import Autoscaler, Host, HostProcess, ProcessSpec
from headrace.observe.status import ProcessStatus
from headrace.transport.run_dir import RunDir


class SimulatedClock:
    """Replaces the module `time`: sleeping runs the events of that time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def sleep(self, seconds: float, /) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end


class SimulatedProcess(HostProcess):
    def __init__(self, spec: ProcessSpec, log: Path, pid: int) -> None:
        super().__init__(spec, log)
        self.pid, self.status = pid, None
        self.received: list[signal.Signals] = []

    status: int | None

    @property
    def exit_status(self) -> int | None:
        return self.status

    def send_signal(self, number: signal.Signals) -> None:
        self.received.append(number)
        if self.running:
            self.status = 128 + number

    def kill(self) -> None:
        if self.running:
            self.status = -signal.SIGKILL


class SimulatedHosts:
    """Implements `Hosts`. Every process is up at once."""

    autoscaler: Autoscaler | None = None

    def __init__(self, run: RunDir, hosts: Sequence[Host]) -> None:
        self.listed = list(hosts)
        self.started: list[SimulatedProcess] = []
        self._run = run
        run.status.mkdir(parents=True, exist_ok=True)

    def wait_until_ready(self) -> Sequence[Host]:
        return self.list()

    def list(self) -> Sequence[Host]:
        return list(self.listed)

    def start(self, spec: ProcessSpec, log: Path) -> SimulatedProcess:
        process = SimulatedProcess(spec, log, pid=1000 + len(self.started))
        self.started.append(process)
        status = ProcessStatus(spec.name, process.pid, 0.0, "working")
        (self._run.status / f"{spec.name}.json").write_bytes(msgspec.json.encode(status))
        if spec.host not in [host.name for host in self.listed]:
            process.status, process.host_is_lost = -signal.SIGKILL, True
        return process

    def free_port(self, host: str) -> int:
        return 5000 + len(self.started)

    def close(self) -> None:
        pass

    def current(self, name: str) -> SimulatedProcess:
        return next(process for process in reversed(self.started) if process.name == name)

    def lose(self, name: str) -> None:
        self.listed = [host for host in self.listed if host.name != name]
        for process in self.started:
            if process.spec.host == name and process.running:
                process.status, process.host_is_lost = -signal.SIGKILL, True

    def end(self, name: str, status: int) -> None:
        self.current(name).status = status

    def finish(self) -> None:
        """End all running processes but servers as if their work were done."""
        for process in self.started:
            if process.running and not process.spec.service:
                process.status = 0
