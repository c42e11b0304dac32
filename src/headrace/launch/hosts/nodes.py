"""Hosts that have joined the driver: on each of them `headrace node RUN` was started, by hand or by a scheduler."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from headrace.config.launch import LaunchConfig
from headrace.launch.driver import Driver
from headrace.launch.errors import LaunchError, notify
from headrace.launch.hosts.base import Host, HostProcess, ProcessSpec
from headrace.launch.node_messages import Command, Kill, ProcessState, Signal, Start, Stop
from headrace.launch.node_registry import Node
from headrace.launch.placement import Needs, place
from headrace.launch.process import GRACE_S
from headrace.launch.restarts import HostWait
from headrace.transport.run_dir import RunDir

JOIN_TIMEOUT_S = 30.0
POLL_S = 0.05
SETTLE_S = 1.0
"""Hosts that were waiting for the driver join within this time, also those without which the run could start."""


class NodeProcess(HostProcess):
    """A process on a host with a node agent."""

    is_here = False

    def __init__(self, spec: ProcessSpec, log: Path, driver: Driver, number: int, node: Node | None) -> None:
        """`node`: None if the host is lost by now."""
        super().__init__(spec, log)
        self._driver, self._number, self._node = driver, number, node
        self._ended_with: int | None = None
        self._was_killed_after_end = False

    @property
    def exit_status(self) -> int | None:
        if self._ended_with is None:
            with self._driver.locked():
                state = ProcessState() if self._node is None else self._node.processes[self._number]
                is_gone = self._node is None or self._node.is_gone
                # A host that leaves stops its processes, which is not their failure.
                has_left = self._node is not None and self._node.is_leaving and state.exit_status is not None
            self.host_is_lost = has_left or (is_gone and state.exit_status is None)
            self.pid, self.peak_bytes, self.memory = state.pid, state.peak_bytes, state.memory
            self._ended_with = -signal.SIGKILL if self.host_is_lost else state.exit_status
        return self._ended_with

    def send_signal(self, number: signal.Signals) -> None:
        if self.running:
            self._send(Signal(self._number, number))

    def kill(self) -> None:
        if not self._was_killed_after_end:
            self._was_killed_after_end = not self.running
            self._send(Kill(self._number))

    def _send(self, command: Command) -> None:
        if self._node is not None:
            self._driver.send(self._node, command)


def open_hosts(launch: LaunchConfig, run: RunDir, needs: Needs) -> NodeHosts:
    """Return the hosts that join this launcher."""
    return NodeHosts(open_driver(launch, run), needed=max(1, needs.nodes), needs=needs, timeout_s=launch.join_timeout)


def open_driver(launch: LaunchConfig, run: RunDir, least_rejoin_s: float = 0.0) -> Driver:
    """Return the driver of a run file. Its notices go to the terminal until a view takes them."""
    rejoin_s = max(launch.rejoin_timeout, least_rejoin_s)
    return Driver(run, port=launch.driver_port, interface=launch.interface, rejoin_s=rejoin_s, notify=notify)


class NodeHosts:
    """Implements `Hosts`. `needed`: hosts without which the run does not start.

    `needs`: what the run asks of them; hosts that cannot be enough are refused before all of them have joined.
    """

    autoscaler = None

    def __init__(
        self,
        driver: Driver,
        *,
        needed: int,
        needs: Needs | None = None,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        self.driver, self._run, self._needed = driver, driver.run, needed
        self._needs, self._timeout_s = needs, timeout_s
        self._numbers = count(1)

    def wait_until_ready(self) -> Sequence[Host]:
        started = time.monotonic()
        wait = HostWait(started, self._timeout_s, "launch.join_timeout")
        while True:
            now = time.monotonic()
            with self.driver.locked() as nodes:
                is_checked, problems = not nodes.pending(), nodes.unreachable()
                computing, usable = _computing(nodes.living()), _computing(nodes.usable())
                if len(usable) >= self._needed and is_checked and now - started > SETTLE_S:
                    nodes.sort()
                    for problem in problems:
                        self.driver.notify(f"{problem}; one of them is left out")
                    return [node.host for node in nodes.usable()]
                is_unreachable = len(computing) >= self._needed > len(usable) and is_checked
                refusals = list(self.driver.refusals.values())
            if refusals or is_unreachable:
                raise LaunchError("\n".join([*refusals, *problems]))
            if self._needs is not None and (each := self._needs.gpus_per_node) is not None:
                # Raises `ConfigError` if the hosts are not enough whatever joins later: one of them has too few GPUs.
                gpus = tuple(map(str, range(each)))
                expected = [Host(f"host {n}", gpus=gpus) for n in range(len(computing), self._needed)]
                place([*(node.host for node in computing), *expected], self._needs)
            if wait.is_over(now):
                raise LaunchError(self._describe_missing(computing))
            if now - started > SETTLE_S and wait.is_due(now):
                self.driver.notify(wait.notice(now, self._describe_missing(computing)))
            time.sleep(POLL_S)

    def _describe_missing(self, nodes: Sequence[Node]) -> str:
        """Return which hosts have joined, and what is known about the others."""
        joined = [node.name for node in nodes]
        head = f"{len(joined)} of {self._needed} hosts have joined{': ' * bool(joined)}{', '.join(joined)}"
        lines = [f"{head}. Start `headrace node {self._run.root}` on more hosts."]
        for log in sorted(self._run.logs.glob("node-*.log")):
            name = log.stem.removeprefix("node-")
            if name not in joined and (written := log.read_text(errors="replace").splitlines()):
                lines.append(f"host {name}: {written[-1]}")
        return "\n".join([*lines, *(f"{what} came from {address}" for address, what in self.driver.rejected.items())])

    def list(self) -> Sequence[Host]:
        with self.driver.locked() as nodes:
            return [node.host for node in nodes.usable()]

    def start(self, spec: ProcessSpec, log: Path) -> NodeProcess:
        number = next(self._numbers)
        with self.driver.locked() as nodes:
            node = nodes.get(spec.host) if spec.host else next(iter(nodes.usable()), None)
            if node is not None and node.is_leaving:
                node = None
            process = NodeProcess(spec, log, self.driver, number, node)
            if node is not None:
                argv = [node.facts.python if word == sys.executable else word for word in spec.argv]
                env = {**self.driver.env, **spec.env}
                self.driver.send(node, Start(number, spec.name, argv, env, str(log.resolve())))
        return process

    def free_port(self, host: str) -> int:
        with self.driver.locked() as nodes:
            node = nodes.get(host)
            if node is None or not node.free_ports:
                raise LaunchError(f"host {host}: it is lost, or has reported no free port")
            port = node.free_ports.pop()
            node.used_ports.add(port)
            return port

    def close(self) -> None:
        """Stop the processes that still run, end the node agents, and close the driver."""
        with self.driver.locked() as nodes:
            for node in nodes.living():
                self.driver.send(node, Stop())
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            with self.driver.locked() as nodes:
                if not any(nodes.living()):
                    break
            time.sleep(POLL_S)
        self.driver.close()


def _computing(nodes: Iterable[Node]) -> list[Node]:
    """Return the hosts that may train or sample."""
    return [node for node in nodes if node.facts.role != "orchestrator"]
