"""This machine as the only host of a run: processes are children of the launcher."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.process import Lifeline, Process
from headrace.machine import usable_cores, visible_gpus

LOOPBACK = "127.0.0.1"


def this_machine() -> Host:
    return Host(socket.gethostname(), LOOPBACK, tuple(visible_gpus()), usable_cores())


class LocalHosts:
    """Implements `Hosts`. The processes inherit the `inherited` descriptors, and stop when this process ends."""

    autoscaler = None

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited, self._lifeline = inherited, Lifeline()

    def wait_until_ready(self) -> Sequence[Host]:
        return self.list()

    def list(self) -> Sequence[Host]:
        return [this_machine()]

    def start(self, spec: ProcessSpec, log: Path) -> Process:
        return Process(spec, log, self._lifeline, self._inherited)

    def free_port(self, host: str) -> int:
        with socket.create_server((LOOPBACK, 0)) as probe:
            return int(probe.getsockname()[1])

    def close(self) -> None:
        self._lifeline.close()
