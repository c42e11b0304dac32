"""Start the processes of a run, restart those that crash, move those of lost hosts, and stop all of them in order.

A process that a signal ended, or that exits with status `AGAIN` (a server whose engine died), is restarted alone: its
state is in the run directory, and the other processes wait for it. So is a process whose host is lost, on another host
if there is one. Processes of a group end and restart together. Any other failure ends the run; in a group on several
hosts it is first awaited whether a host is lost, which makes the others fail. The rules are in `restarts`; what is
wrong with a run that does not advance is found by `observe.diagnosis`.

A process that the kernel ended for memory is restarted once, in case another program had taken the memory, and not at
all if it used most of the memory itself.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Protocol

from headrace.config.base import ConfigError
from headrace.errors import AGAIN, BAD_INPUT, RESTART_RUN, SAVED, Failure
from headrace.launch.errors import InputRefused, LaunchError, RestartNeeded
from headrace.launch.fleet import Fleet, Plan, unit_of
from headrace.launch.heartbeat import Heartbeat, launcher_lines
from headrace.launch.hosts.base import Host, HostProcess, Hosts, ProcessSpec
from headrace.launch.out_of_memory import MEMORY_ADVICE, OomMonitor, OutOfMemory
from headrace.launch.process import SAVE_AND_STOP, signals_to
from headrace.launch.restarts import RESTART_DELAY_S, HostWait, Recovery, Restarts
from headrace.machine import HostMemory
from headrace.observe.diagnosis import STALL_S, Finding, diagnose, signs_of_progress, works_long
from headrace.observe.metrics import History, MetricsCollector, Tail
from headrace.observe.run_state import RunState, add_machine
from headrace.observe.status import ObservedStatus, StatusReader, is_up, not_up
from headrace.observe.terminal import View
from headrace.transport.run_dir import RunDir

POLL_S = 0.1
DIAGNOSIS_INTERVAL_S = 2.0
TRAINER = "trainer"
SCALE_TIMEOUT_S = 30.0


class Clock(Protocol):
    """The module `time`, or a simulation of it."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Supervisor:
    """Starts the processes of `plan` on `hosts` in order, and stops them in reverse order."""

    def __init__(
        self,
        plan: Plan,
        hosts: Hosts,
        run: RunDir,
        view: View,
        *,
        start_timeout: float,
        stop_timeout: float,
        max_restarts: int,
        restart_delay_s: float = RESTART_DELAY_S,
        stall_s: float = STALL_S,
        heartbeat: Heartbeat | None = None,
        memory: HostMemory | None = None,
        memory_advice: str = MEMORY_ADVICE,
        save_on_sigterm: bool = False,
        clock: Clock = time,
    ) -> None:
        """`memory_advice`: a sentence on what makes the run need less host memory."""
        self.history = History()
        self._plan, self._hosts, self._run, self._view, self._clock = plan, hosts, run, view, clock
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._heartbeat = heartbeat or Heartbeat(run.heartbeat)
        self._collector = MetricsCollector(run.metrics)
        self._tail, self._reader = Tail(run.metrics), StatusReader(run.status, clock.monotonic)
        self._fleet = Fleet(plan, hosts, run, view, stop_timeout)
        self._listed: Sequence[Host] = ()
        """The hosts for which the plan was made."""
        self._up: set[str] = set()
        self._killed: set[HostProcess] = set()
        """Processes that were killed because they had failed and did not end."""
        self._restarts = Restarts(max_restarts, restart_delay_s)
        self._restarted: Counter[str] = Counter()
        """By unit, in the whole run."""
        self._displaced: dict[str, str] = {}
        """Units that wait for a new place: what was lost."""
        self._host_wait: HostWait | None = None
        self._recovery: Recovery | None = None
        self._scale_requests: SimpleQueue[tuple[int, Future[str]]] = SimpleQueue()
        self._oom, self._memory_advice = OomMonitor(memory or HostMemory()), memory_advice
        self._statuses: dict[str, ObservedStatus] = {}
        self._notices_shown: Counter[tuple[str, int]] = Counter()
        """By name and process id, which processes on different hosts may share."""
        self._signals: list[int] = []
        self._saving_signals = {SAVE_AND_STOP, signal.SIGTERM} if save_on_sigterm else {SAVE_AND_STOP}
        self._stall_s = stall_s
        self._findings: list[Finding] = []
        self._diagnosed_at = -math.inf

    def run(self) -> int:
        """Return 0 when the work is done, or 128 + N after signal N. Raises `LaunchError` when a process fails."""
        state, problem = "failed", None
        with signals_to(self._signals):
            try:
                self._start()
                code = self._supervise()
                state = "stopped" if code else "finished"
                return code
            except LaunchError as error:
                problem = str(error).partition("\n")[0]
                raise
            finally:
                try:
                    self._stop()
                finally:
                    self._heartbeat.close(state, problem)
                    self._view.close(self.history, self._statuses)

    def scale(self, servers: int) -> str:
        """Change the number of servers, from any thread; return what happens. Raises `Failure`."""
        answer: Future[str] = Future()
        self._scale_requests.put((servers, answer))
        try:
            return answer.result(SCALE_TIMEOUT_S)
        except FutureTimeout:
            raise LaunchError("the run is starting or ending; try again later") from None

    def metric_lines(self) -> Iterator[str]:
        """Return metrics of the run, from any thread."""
        running = {name: process.running for name, process in list(self._fleet.processes.items())}
        return launcher_lines(self.history, self._statuses, running, dict(self._restarted))

    def say(self, sentence: str) -> None:
        self._view.say(sentence)

    def _start(self) -> None:
        for stale in (*self._run.status.rglob("*.json"), *self._run.endpoints.glob("*.json")):
            stale.unlink(missing_ok=True)
        self._read()
        self._listed = self._hosts.list()
        self._view.say(f"starting {', '.join(self._fleet.specs)}; logs in {self._run.logs}")
        for unit in self._fleet.units():
            self._start_unit(unit)

    def _start_unit(self, unit: str, *, again: bool = False) -> None:
        self._fleet.start(unit, again=again)
        self._restarted[unit] += again
        self._up.difference_update(process.name for process in self._fleet.members(unit))
        self._started = self._clock.monotonic()  # of the last one: other processes may wait for it to come up

    def _supervise(self) -> int:
        while not self._signals:
            # Before the statuses are read, so that they include the last report of a process that has ended.
            runs = {process: process.running for process in self._fleet.processes.values()}
            running = [process for process, still_runs in runs.items() if still_runs]
            ended = [process for process, still_runs in runs.items() if not still_runs]
            self._read()
            now = self._clock.monotonic()
            self._oom.observe(now)
            self._diagnose({process.name for process in running})
            self._view.show(self.history, self._statuses, self._findings)
            problem = next((str(finding) for finding in self._findings if finding.severity == "problem"), "")
            self._heartbeat.update(
                self.history.step,
                self.history.moves,
                problem,
                self._restarts.ends,
                signs_of_progress(self._statuses),
                any(works_long(status) for status in self._statuses.values()),
            )
            finished = {process for process in ended if process.exit_status == 0 and not self._has_failed(process)}
            if all(process.spec.service or process in finished for process in self._fleet.processes.values()):
                return 0
            if any(process.exit_status == SAVED for process in ended):
                self._signals.append(SAVE_AND_STOP)
                break
            self._handle_lost(ended, now)
            self._handle_ended(ended, now)
            self._handle_requests(now)
            self._fleet.draining.advance(now, self._statuses)
            self._release_idle_hosts()
            self._check(running)
            for unit in self._restarts.take_due(now, self._fleet.ending()):
                self._read()
                if unit == TRAINER and self._recovery is not None:
                    self._recovery.step = self.history.step
                self._start_unit(unit, again=True)
            self._clock.sleep(POLL_S)
        if self._signals[0] in self._saving_signals:
            self._save()
        names = ", ".join(process.name for process in reversed(self._fleet.processes.values()) if process.running)
        self._view.say(f"{signal.Signals(self._signals[0]).name}: stopping {names or '(no process is running)'}")
        return 128 + self._signals[0]

    def _read(self) -> None:
        now = self._clock.monotonic()
        self._collector.collect()
        for record in self._tail.read():
            self.history.add(record)
            if self._recovery is None or "loss" not in record or self._is_waiting(TRAINER):
                continue
            if report := self._recovery.record(now, int(record["step"])):
                self._view.say(report)
                self._recovery = None
        self._restarts.record_progress(self.history)
        self._statuses = self._reader.read()
        for status in self._statuses.values():
            for notice in status.notices[self._notices_shown[status.process, status.pid] :]:
                self._view.say(f"{status.process}: {notice}")
            self._notices_shown[status.process, status.pid] = len(status.notices)

    def _diagnose(self, running: Set[str]) -> None:
        now = time.monotonic()  # as the heartbeat: what is looked at is this machine, also in a simulation
        if now < self._diagnosed_at + DIAGNOSIS_INTERVAL_S:
            return
        self._diagnosed_at = now
        statuses = {name: status for name, status in self._statuses.items() if name in running}
        state = RunState(self.history, statuses, self._heartbeat.content, host=socket.gethostname())
        add_machine(state, self._run)
        self._findings = diagnose(state, self._stall_s)

    def _is_waiting(self, unit: str) -> bool:
        """Whether a unit waits for its restart."""
        return unit in self._restarts.due or unit in self._displaced

    def _handle_lost(self, ended: list[HostProcess], now: float) -> None:
        """Move the processes of lost hosts, with their groups, to other hosts; wait for hosts if these are too few."""
        for process in ended:
            unit = unit_of(process.spec)
            if process.host_is_lost and not self._is_waiting(unit):
                self._displaced[unit] = f"{process.name} {process.how_it_ended()}"
                self._begin_recovery(unit, f"the loss of host {process.spec.host} was detected", now)
                self._fleet.retire(unit)
        hosts = self._hosts.list()
        if not self._displaced and not (self._plan.left_out and hosts != self._listed):
            return
        try:
            specs = self._plan.move(hosts)
        except ConfigError as error:
            if not self._displaced:
                self._listed = hosts
                return
            self._host_wait = self._host_wait or HostWait(now, self._start_timeout)
            if self._host_wait.is_over(now):
                raise LaunchError(f"{'; '.join(self._displaced.values())}. {error}") from error
            if self._host_wait.is_due(now):
                self._view.say(self._host_wait.notice(now, str(error)))
            return
        self._host_wait, self._listed = None, hosts
        displaced, self._displaced = self._displaced, {}
        for unit, how in displaced.items():
            if not self._restarts.allows(unit) and not self._has_substitute(unit):
                raise LaunchError(f"{how} after {self._restarts.most} restarts without progress")
            self._restarts.schedule(unit, now)
        self._follow(specs, now)
        for unit, how in displaced.items():
            places = ", ".join(f"{spec.name} on {spec.host}" for spec in self._fleet.specs_of(unit))
            attempt = f"{self._restarts.in_a_row[unit]} of {self._restarts.most}"
            self._view.say(f"{how}; " + (f"restarting {places} ({attempt})" if places else "no host has room for it"))

    def _follow(self, specs: Sequence[ProcessSpec], now: float) -> None:
        changed, gone = self._fleet.follow(specs, now)
        for unit in changed:
            self._restarts.due.setdefault(unit, now)
        for unit in gone:
            self._restarts.due.pop(unit, None)

    def _handle_requests(self, now: float) -> None:
        """Change the number of servers as requested."""
        while not self._scale_requests.empty():
            servers, answer = self._scale_requests.get()
            before = list(self._fleet.specs)
            autoscaler = self._hosts.autoscaler
            try:
                self._follow(self._plan.scale(self._hosts.list(), servers, may_wait=autoscaler is not None), now)
            except Failure as error:
                answer.set_exception(error)
                continue
            left_out = self._plan.left_out
            if autoscaler is not None:
                autoscaler.request(len(left_out), len(left_out[0].gpus) if left_out else 0)
            added = [f"starting {s.name} on {s.host}" for s in self._fleet.specs.values() if s.name not in before]
            removed = [f"draining {name}" for name in before if name not in self._fleet.specs]
            waiting = [f"{place.name} waits for a host" for place in left_out]
            sentence = f"{servers} inference servers: {', '.join([*added, *removed, *waiting]) or 'nothing changes'}"
            self._view.say(sentence)
            answer.set_result(sentence)

    def _release_idle_hosts(self) -> None:
        """Give hosts back that were added for servers which have left the run."""
        if self._hosts.autoscaler is not None and not self._plan.left_out and not self._displaced:
            used = [*self._fleet.specs.values(), *(process.spec for process in self._fleet.draining.processes)]
            idle = {host.name for host in self._hosts.list()} - {spec.host for spec in used}
            self._hosts.autoscaler.release(sorted(idle))

    def _handle_ended(self, ended: list[HostProcess], now: float) -> None:
        """Schedule restarts of crashed processes; raise `LaunchError` if one cannot be restarted."""
        died = [p for p in ended if p.exit_status != 0 or p.spec.service or self._has_failed(p)]
        died = [process for process in died if not self._is_waiting(unit_of(process.spec))]
        died = [process for process in died if process.name in self._fleet.specs]  # else no host has room for it
        if repaired := [process.name for process in died if process.exit_status == RESTART_RUN]:
            raise RestartNeeded(f"{', '.join(repaired)} set a damaged file aside")
        # A restart does not help after a process has reported its failure.
        crashed = [p for p in died if p.exit_status == AGAIN or (p.was_killed and not self._has_failed(p))]
        units = {unit_of(process.spec) for process in crashed}
        out_of_memory = {process: self._find_out_of_memory(process) for process in died}
        failed = [process for process in died if unit_of(process.spec) not in units]
        failed = [process for process in failed if not self._may_be_victim(process, now)]
        refused = [p for p in crashed if not self._restarts.allows(unit_of(p.spec), out_of_memory[p])]
        refused = [p for p in refused if out_of_memory[p] is not None or not self._has_substitute(p.name)]
        if failed or refused:
            error = InputRefused if any(process.exit_status == BAD_INPUT for process in died) else LaunchError
            raise error("\n".join(self._describe_failure(process, out_of_memory[process]) for process in died))
        for process in crashed:
            unit = unit_of(process.spec)
            if self._is_waiting(unit):  # with another member
                continue
            self._begin_recovery(unit, f"{process.name} {process.how_it_ended()}", now)
            self._fleet.retire(unit)
            delay_s = self._restarts.schedule(unit, now)
            when = f"restarting it in {delay_s:g} s" if delay_s else "restarting it"
            attempt = f"{self._restarts.in_a_row[unit]} of {self._restarts.most}"
            if out_of_memory[process] is not None:
                self._restarts.out_of_memory.add(unit)
            status = self._status_of(process)
            reason = f" ({status.problem})" if status and status.state == "failed" and status.problem else ""
            how = out_of_memory[process] or f"{process.name} {process.how_it_ended()}{reason}"
            self._restarts.ends[unit] = f"{how}; restart {attempt}"
            self._view.say(f"{how}; {when} ({attempt})")

    def _has_substitute(self, unit: str) -> bool:
        """Whether a unit is a server beside others that are up: its crashes cost throughput, not the run."""
        servers = [process for process in self._fleet.processes.values() if process.spec.service]
        others = [process for process in servers if process.name != unit]
        return len(others) < len(servers) and any(other.name in self._up and other.running for other in others)

    def _may_be_victim(self, process: HostProcess, now: float) -> bool:
        """Whether a process may have failed because the host of another member of its group is lost."""
        unit = unit_of(process.spec)
        spans_hosts = len({spec.host for spec in self._fleet.specs_of(unit)}) > 1
        return spans_hosts and process.exit_status != BAD_INPUT and self._restarts.awaits_news(unit, now)

    def _begin_recovery(self, unit: str, cause: str, now: float) -> None:
        if unit == TRAINER and self._recovery is None and self.history.step:
            self._recovery = Recovery(cause, now, self.history.step)

    def _status_of(self, process: HostProcess) -> ObservedStatus | None:
        """Return the status that this process, not an earlier one of its name, has written."""
        status = self._statuses.get(process.name)
        return status if status is not None and status.pid == process.pid else None

    def _has_failed(self, process: HostProcess) -> bool:
        """Whether the process has reported its failure."""
        status = self._status_of(process)
        return process in self._killed or (status is not None and status.state == "failed")

    def _find_out_of_memory(self, process: HostProcess) -> OutOfMemory | None:
        """Return how the process ended for lack of memory; None if it ended in another way, or was killed by us."""
        status = self._status_of(process)
        doing = "" if status is None or status.state == "failed" else status.state
        return None if process in self._killed else self._oom.explain(process, doing, self._clock.monotonic())

    def _describe_failure(self, process: HostProcess, out_of_memory: OutOfMemory | None) -> str:
        head = str(out_of_memory or f"{process.name} {process.how_it_ended()}")
        if restarts := self._restarts.in_a_row.get(unit_of(process.spec)):
            head += f" after {restarts} restart{'s' * (restarts > 1)} without progress"
        advice = [] if out_of_memory is None else [self._memory_advice]
        lines = [f"    {line}" for line in process.last_lines()]
        if not lines:
            return "\n".join([f"{head} and wrote no log", *advice])
        return "\n".join([f"{head}; the end of {process.log}:", *lines, *advice])

    def _check(self, running: list[HostProcess]) -> None:
        """Raise `LaunchError` if a process does not come up in time; kill those that have failed and do not end."""
        now = self._clock.monotonic()
        # The first process of a group reports for all of it.
        names = [process.name for process in running if process.name == unit_of(process.spec)]
        self._up.update(name for name in names if is_up(self._statuses.get(name)))
        missing = not_up([name for name in names if name not in self._up], self._statuses)
        if missing and now - self._started > self._start_timeout:
            limit = f"not up after {self._start_timeout:.0f} s (launch.start_timeout)"
            raise LaunchError(f"{limit}: {', '.join(missing)}; their logs are in {self._run.logs}")
        for process in running:
            status = self._statuses.get(process.name)
            if status is not None and status.state == "failed" and status.silent_s > self._stop_timeout:
                # It has failed, but a thread or another rank keeps it alive.
                self._killed.add(process)
                process.kill()

    def _save(self) -> None:
        """Have the trainer end with a checkpoint of its last step. Another signal ends the wait."""
        trainers = [process for process in self._fleet.members(TRAINER) if process.running]
        for process in trainers:
            process.send_signal(SAVE_AND_STOP)
        name = signal.Signals(self._signals[0]).name
        self._view.say(f"{name}: the trainer finishes its step and saves a checkpoint")
        statuses = (None, 0, SAVED)  # else a member has failed, and the others may wait for it
        while (
            any(process.running for process in trainers)
            and all(process.exit_status in statuses for process in trainers)
            and len(self._signals) == 1
        ):
            self._clock.sleep(POLL_S)
            self._read()
            self._view.show(self.history, self._statuses)

    def _stop(self) -> None:
        """Stop running processes, last started first, and all servers together. A second signal kills them at once."""
        units: dict[str, list[HostProcess]] = {}
        for process in (*reversed(self._fleet.processes.values()), *self._fleet.draining.processes):
            units.setdefault("" if process.spec.service else unit_of(process.spec), []).append(process)
        for processes in units.values():
            for process in processes:
                process.terminate()
            deadline = self._clock.monotonic() + self._stop_timeout
            while any(process.running for process in processes):
                if self._clock.monotonic() >= deadline or len(self._signals) >= 2:
                    break
                self._clock.sleep(0.02)
            for process in processes:
                if process.running:
                    self._view.say(f"{process.name} did not stop and is killed")
                process.kill()  # even if it has ended: its children may still run
            for process in processes:
                process.wait(self._stop_timeout)
        self._collector.close()
        self._read()
