"""The interface to the hosts of a run: list them; start, signal and watch processes on them; read their logs.

All hosts see the run directory under the same path, so that a log is a file everywhere.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from headrace.errors import AGAIN

LAST_LINES = 15
LAST_BYTES = 16384
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
WAIT_POLL_S = 0.02

HostRole = Literal["", "trainer", "inference", "spare", "orchestrator"]


@dataclass(frozen=True)
class Host:
    """A host that takes part in a run."""

    name: str
    address: str = "127.0.0.1"
    """The address at which processes on the other hosts reach it."""
    gpus: tuple[str, ...] = ()
    cores: int = 1
    role: HostRole = ""
    """What it is meant for, if that was said when it joined."""


@dataclass(frozen=True)
class MemoryAtEnd:
    """The memory of a host when a process on it ended."""

    total_bytes: int
    """Memory of the machine, or the limit of its container."""
    was_short: bool
    """Whether the kernel had ended a process for memory shortly before."""


@dataclass(frozen=True)
class ProcessSpec:
    """A command to start. A service runs until it is stopped; other processes end when their work is done."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    service: bool = False
    restart_argv: Sequence[str] | None = None
    """The command that continues its work after a crash, if it differs from `argv`."""
    host: str = ""
    """The name of its host; empty: the only one."""
    group: str = ""
    """Processes of one group, on several hosts, are started and restarted together; empty: it is alone."""

    def again(self) -> ProcessSpec:
        return replace(self, argv=self.restart_argv or self.argv)


class HostProcess(ABC):
    """A process that was started on a host."""

    is_here = True
    """Whether it runs on this machine."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self.spec, self.name, self.log = spec, spec.name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self.pid = 0
        """On its host; 0 until it is known."""
        self.peak_bytes = 0
        """Most resident memory of the process, or of one of its children that it waited for; 0 while it runs."""
        self.memory: MemoryAtEnd | None = None
        """As its own host has reported it."""
        self.host_is_lost = False
        """Whether it is considered ended because its host no longer answers."""

    @property
    @abstractmethod
    def exit_status(self) -> int | None:
        """None while it runs; -N if signal N ended it. A process whose host is lost has ended by SIGKILL."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its children, if it is running."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and its children. After the process has ended, only the first call has an effect."""

    def terminate(self) -> None:
        """Ask the process to stop, if it is running."""
        self.send_signal(signal.SIGTERM)

    @property
    def running(self) -> bool:
        return self.exit_status is None

    @property
    def was_killed(self) -> bool:
        """Whether it crashed: a signal other than a stop request ended it (out of memory, segmentation fault)."""
        status = self.exit_status
        return status is not None and status < 0 and -status not in STOP_SIGNALS

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end, and return whether it has."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(WAIT_POLL_S)
        return not self.running

    def how_it_ended(self) -> str:
        status = self.exit_status
        if self.host_is_lost:
            return f"was lost with its host {self.spec.host}"
        if status is None:
            return "is still running"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        if status == AGAIN:
            return "ended because its engine died"
        name = f" ({signal.Signals(status - 128).name})" if status - 128 in signal.valid_signals() else ""
        return f"ended with exit status {status}{name}"

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """Return the last lines that this process, not an earlier one, has written to its log."""
        if not self.log.exists():
            return []
        with open(self.log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, file.tell() - LAST_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]


class Autoscaler(Protocol):
    """A scheduler that adds hosts to a run in progress. Every method returns at once."""

    def request(self, servers: int, gpus: int) -> None:
        """Ask for hosts with room for `servers` of `gpus` GPUs each, which are listed when they have come.

        A request replaces the last one, as far as that is not met yet.
        """

    def release(self, hosts: Sequence[str]) -> None:
        """Give back those of these idle hosts that were added on request."""


class Hosts(Protocol):
    """The hosts of a run. Every method returns at once, except `wait_until_ready`."""

    @property
    def autoscaler(self) -> Autoscaler | None:
        """None: the scheduler does not add hosts on request."""

    def wait_until_ready(self) -> Sequence[Host]:
        """Wait for the hosts that the run needs, check them, and return them in order. Raises `LaunchError`."""

    def list(self) -> Sequence[Host]:
        """Return the hosts that take part now, in a fixed order; lost ones are left out, later ones come last."""

    def start(self, spec: ProcessSpec, log: Path) -> HostProcess:
        """Start a process on the host `spec.host`, its output appended to `log`."""

    def free_port(self, host: str) -> int:
        """Return a port that no process on the host uses at the moment."""

    def close(self) -> None:
        """Release the hosts. Processes that still run are stopped."""
