"""The processes of a run on its hosts: start them in units, end them, and follow a new plan after a change.

A unit is a process, or a group of processes on several hosts that live and end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.launch.draining import Draining, remove_traces
from headrace.launch.hosts.base import Host, HostProcess, Hosts, ProcessSpec
from headrace.launch.placement import Place
from headrace.launch.processes import with_rendezvous
from headrace.observe.terminal import View
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

    def spans_hosts(self, unit: str) -> bool:
        return len({spec.host for spec in self.specs_of(unit)}) > 1

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
            specs = [with_rendezvous(spec, port) for spec in specs]
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
