"""The processes of a run on its hosts: start them in units, end them, and follow a new plan after a change.

A unit is a process, or a group of processes on several hosts that live and end together. Servers that leave a live run
are drained: their addresses are withdrawn, requests in flight end, then the processes are stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.launch.hosts.base import Host, HostProcess, Hosts, ProcessSpec
from headrace.launch.placement import Place
from headrace.observe.status import ObservedStatus
from headrace.observe.terminal import View
from headrace.transport.endpoint import withdraw_endpoints
from headrace.transport.run_dir import RunDir


class Plan(Protocol):
    """The processes of a run, in the order of their start, and where they run."""

    def specs(self) -> Sequence[ProcessSpec]:
        """Return the current processes."""

    def move(self, hosts: Sequence[Host]) -> Sequence[ProcessSpec]:
        """Return the processes after a change of the hosts. Raises `ConfigError` if these are too few."""

    def scale(self, hosts: Sequence[Host], servers: int, may_wait: bool) -> Sequence[ProcessSpec]:
        """Return the processes with this number of servers, some of which may wait for hosts. Raises `ConfigError`."""

    @property
    def left_out(self) -> Sequence[Place]:
        """The servers for which there is no room."""


class Fleet:
    """The processes of `plan`, started on `hosts`."""

    def __init__(self, plan: Plan, hosts: Hosts, run: RunDir, view: View, stop_timeout: float) -> None:
        self.plan, self.hosts = plan, hosts
        self.specs = {spec.name: spec for spec in plan.specs()}
        """By name, in the order of their start: how each process starts the next time."""
        self.processes: dict[str, HostProcess] = {}
        """By name, in the order of their first start."""
        self.draining = Draining(run, view, stop_timeout)
        self._run = run

    def units(self) -> list[str]:
        return list(dict.fromkeys(map(unit_of, self.specs.values())))

    def specs_of(self, unit: str) -> list[ProcessSpec]:
        return [spec for spec in self.specs.values() if unit_of(spec) == unit]

    def members(self, unit: str) -> list[HostProcess]:
        return [process for process in self.processes.values() if unit_of(process.spec) == unit]

    def ending(self) -> set[str]:
        """Return the units with a process that runs, if only until it has ended."""
        processes = [*self.processes.values(), *self.draining.processes]
        return {unit_of(process.spec) for process in processes if process.running}

    def start(self, unit: str, *, again: bool = False) -> None:
        """Start the processes of a unit, which meet at a port of the first one's host if there are several."""
        specs = self.specs_of(unit)
        if len(specs) > 1:
            is_lost = specs[0].host not in [host.name for host in self.hosts.list()]  # then it does not start
            port = 0 if is_lost else self.hosts.free_port(specs[0].host)
            specs = [_with_rendezvous(spec, port) for spec in specs]
        for spec in specs:
            log = self._run.logs / f"{spec.name}.log"
            self.processes[spec.name] = self.hosts.start(spec.again() if again else spec, log)

    def retire(self, unit: str) -> None:
        """Kill the processes of a unit, and remove their traces."""
        for process in self.members(unit):
            process.kill()  # its children, too
            remove_traces(self._run, process)

    def follow(self, specs: Sequence[ProcessSpec], now: float) -> tuple[list[str], list[str]]:
        """End what is not in a new plan, or is in another place. Return the units to start, and those that are gone."""
        before = {unit: _places(self.specs_of(unit)) for unit in self.units()}
        self.specs = {spec.name: spec for spec in specs}
        after = {unit: _places(self.specs_of(unit)) for unit in self.units()}
        changed = [unit for unit in after if before.get(unit) != after[unit]]
        gone = [unit for unit in before if unit not in after]
        for unit in changed:
            self.retire(unit)
        for unit in (*changed, *gone):
            for process in self.members(unit):
                if process.name not in self.specs:
                    del self.processes[process.name]
                    self.draining.add(process, now)
        return changed, gone


def unit_of(spec: ProcessSpec) -> str:
    """Return what is started and restarted together with a process: its group, or itself."""
    return spec.group or spec.name


def _places(specs: Iterable[ProcessSpec]) -> set[tuple[str, str]]:
    return {(spec.name, spec.host) for spec in specs}


MIN_DRAIN_S = 5.0
"""Time in which clients notice that an address was withdrawn."""
MAX_DRAIN_S = 600.0
"""Requests that take longer are cut off, and retried by their clients on another server."""


@dataclass
class Leaving:
    process: HostProcess
    since: float
    terminated_at: float | None = None


class Draining:
    """The servers that are leaving a run. Takes the time."""

    def __init__(self, run: RunDir, view: View, stop_timeout: float) -> None:
        self._run, self._view, self._stop_timeout = run, view, stop_timeout
        self._leaving: list[Leaving] = []

    @property
    def processes(self) -> list[HostProcess]:
        return [leaving.process for leaving in self._leaving]

    def add(self, process: HostProcess, now: float) -> None:
        withdraw_endpoints(self._run.endpoints, process.name)
        self._leaving.append(Leaving(process, now))

    def advance(self, now: float, statuses: Mapping[str, ObservedStatus]) -> None:
        """Stop the servers that have no request left, and forget those that have ended."""
        for leaving in list(self._leaving):
            process = leaving.process
            withdraw_endpoints(self._run.endpoints, process.name)  # it may have published it again with new keys
            if not process.running:
                process.kill()  # its children
                remove_traces(self._run, process)
                self._leaving.remove(leaving)
                self._view.say(f"{process.name} has left the run")
            elif leaving.terminated_at is not None:
                if now - leaving.terminated_at > self._stop_timeout:
                    process.kill()
            else:
                status, waited = statuses.get(process.name), now - leaving.since
                requests = 0 if status is None else sum(status.gauges.get(name, 0) for name in ("running", "waiting"))
                if waited > MAX_DRAIN_S or (waited > MIN_DRAIN_S and not requests):
                    process.terminate()
                    leaving.terminated_at = now


def remove_traces(run: RunDir, process: HostProcess) -> None:
    """Remove the status and the address of a process that has ended."""
    ranks = (run.status / "ranks").glob(f"{process.name}-*.json")
    for status in (run.status / f"{process.name}.json", *ranks):
        status.unlink(missing_ok=True)
    withdraw_endpoints(run.endpoints, process.name)


def _with_rendezvous(spec: ProcessSpec, port: int) -> ProcessSpec:
    """Return a member of the trainer's group whose ranks meet at this port of the first member's host."""

    def completed(argv: Sequence[str]) -> list[str]:
        place = list(argv).index("--rendezvous") + 1
        return [*argv[:place], f"{argv[place].rpartition(':')[0]}:{port}", *argv[place + 1 :]]

    again = None if spec.restart_argv is None else completed(spec.restart_argv)
    return replace(spec, argv=completed(spec.argv), restart_argv=again)
