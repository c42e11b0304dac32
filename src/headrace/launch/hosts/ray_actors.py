"""The actors of a run on a Ray cluster: what runs on its hosts."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress

from headrace.launch.addresses import CheckPort, dial, find_free_ports
from headrace.launch.hosts.ray_cluster import import_ray
from headrace.launch.node import Lease, NodeProcesses, describe_host
from headrace.launch.node_messages import LEASE_S, Join, ProcessState, RunFacts, Start

HOLD_S = 1.0
"""How long an actor holds the answer to a poll."""
POLL_S = 0.05


class HostKeeper:
    """Actor that holds the GPUs of a bundle, and answers for its host."""

    def __init__(self) -> None:
        self._check_port = CheckPort()

    def describe(self, run: RunFacts, driver_host: str) -> Join:
        """Check this host, and return what the driver checks."""
        self._check_port.nonce = secrets.token_hex(8)
        gpus = [str(gpu) for gpu in import_ray().get_gpu_ids()]
        return describe_host(run, driver_host, self._check_port, gpus)

    def dial(self, peer: Join) -> str:
        """Return why the address of another host cannot be reached; empty if it can."""
        return dial(peer.address, peer.check_port, peer.nonce)

    def poll(self) -> None:
        time.sleep(HOLD_S)

    def free_port(self) -> int:
        return find_free_ports(1)[0]

    def kill_session(self, pid: int) -> None:
        """Kill what is left of a process whose actor has died."""
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class ProcessOwner:
    """Actor that owns a process, which stops when the actor ends."""

    def __init__(self, start: Start, directory: str) -> None:
        """`directory`: the working directory of the driver, used if this host has it."""
        with suppress(FileNotFoundError):
            os.chdir(directory)
        self._number, self._processes = start.process, NodeProcesses()
        self._lease = Lease(LEASE_S, self._processes)
        self._processes.start(start)

    def poll(self) -> ProcessState:
        """Renew the lease, and return the state of the process after `HOLD_S`, or at once when it has ended."""
        self._lease.renewed_at = now = time.monotonic()
        while (state := self._processes.states()[self._number]).exit_status is None and time.monotonic() < now + HOLD_S:
            time.sleep(POLL_S)
        return state

    def send_signal(self, number: int) -> None:
        self._processes.send_signal(self._number, number)

    def kill(self) -> None:
        self._processes.kill(self._number)
