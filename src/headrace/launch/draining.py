"""Stop servers of a live run: withdraw their addresses, let requests in flight end, then stop the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.launch.hosts.base import HostProcess
from headrace.observe.status import ObservedStatus
from headrace.observe.terminal import View
from headrace.transport.endpoint import withdraw_endpoints
from headrace.transport.run_dir import RunDir

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
            elif self._is_drained(process, now - leaving.since, statuses):
                process.terminate()
                leaving.terminated_at = now

    def _is_drained(self, process: HostProcess, waited: float, statuses: Mapping[str, ObservedStatus]) -> bool:
        status = statuses.get(process.name)
        requests = 0 if status is None else sum(status.gauges.get(name, 0) for name in ("running", "waiting"))
        return waited > MAX_DRAIN_S or (waited > MIN_DRAIN_S and not requests)


def remove_traces(run: RunDir, process: HostProcess) -> None:
    """Remove the status and the address of a process that has ended."""
    ranks = (run.status / "ranks").glob(f"{process.name}-*.json")
    for status in (run.status / f"{process.name}.json", *ranks):
        status.unlink(missing_ok=True)
    withdraw_endpoints(run.endpoints, process.name)
