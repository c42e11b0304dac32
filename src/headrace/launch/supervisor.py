"""Starts the processes of a run, watches over them, and ends them all in order whatever happens.

A process that a signal ended is started again alone: the run directory has lost nothing, and the others wait for it.
So is one that asks for it by its exit status: a server whose engine died. One that ended with any other status has said
what is wrong, or was asked to end; that ends the run.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from headrace.launch.errors import InputRefused, LaunchError
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.lifeline import Lifeline
from headrace.launch.process import Process, ProcessSpec
from headrace.launch.restarts import DELAY, Restarts
from headrace.launch.watch import PATIENCE, Watch, is_up, not_up
from headrace.observe.history import History, Tail
from headrace.observe.status import ProcessStatus, read_status
from headrace.observe.terminal import View
from headrace.transport.endpoint import withdraw_endpoint
from headrace.transport.run_dir import RunDir

POLL = 0.1


class Supervisor:
    """Starts `specs` in order and stops them in the reverse order. They keep the `inherited` descriptors open."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run: RunDir,
        view: View,
        *,
        start_timeout: float,
        stop_timeout: float,
        max_restarts: int,
        restart_delay: float = DELAY,
        patience: float = PATIENCE,
        inherited: Sequence[int] = (),
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.history = History()
        self._specs, self._run, self._view = specs, run, view
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._inherited = inherited
        self._heartbeat = heartbeat or Heartbeat(run.heartbeat)
        self._tail = Tail(run.metrics)
        self._lifeline = Lifeline()
        self._processes: dict[str, Process] = {}
        """By name, in the order of their first start; a process takes the place of the one that it continues."""
        self._up: set[str] = set()
        self._condemned: set[Process] = set()
        """Those that were killed because they had failed and did not end."""
        self._restarts = Restarts(max_restarts, restart_delay)
        self._statuses: dict[str, ProcessStatus] = {}
        self._notices_said: Counter[int] = Counter()
        """By process id."""
        self._signals: list[int] = []
        self._watch = Watch(time.time(), patience)

    def run(self) -> int:
        """0 when the work is done, 128 + signal when it was interrupted; raises `LaunchError` when a process failed."""
        state = "failed"
        with signals_to(self._signals):
            try:
                self._start()
                code = self._supervise()
                state = "stopped" if code else "finished"
                return code
            finally:
                try:
                    self._stop()
                finally:
                    self._heartbeat.close(state)
                    self._view.close(self.history, self._statuses)
                    self._lifeline.close()

    def _start(self) -> None:
        for stale in (*self._run.status.rglob("*.json"), *self._run.endpoints.glob("*.json")):
            stale.unlink(missing_ok=True)
        self._read()
        self._view.say(f"starting {', '.join(spec.name for spec in self._specs)}; logs in {self._run.logs}")
        for spec in self._specs:
            self._start_process(spec)

    def _start_process(self, spec: ProcessSpec) -> None:
        log = self._run.logs / f"{spec.name}.log"
        self._processes[spec.name] = Process(spec, log, self._lifeline, self._inherited)
        self._up.discard(spec.name)
        self._started = time.monotonic()  # of the newest: others may be waiting for it to come up themselves

    def _supervise(self) -> int:
        while not self._signals:
            # Before the news are read: what a process reported before it ended is then always among them.
            running = [process for process in self._processes.values() if process.running]
            ended = [process for process in self._processes.values() if process not in running]
            self._read()
            self._view.show(self.history, self._statuses)
            problem = next((status.problem for status in self._statuses.values() if status.problem), "")
            self._heartbeat.look(self.history.step, self.history.moves, problem)
            finished = [process for process in ended if process.exit_status == 0 and not self._has_failed(process)]
            if all(process.spec.service or process in finished for process in self._processes.values()):
                return 0
            self._bury(ended)
            self._check(running)
            for name in self._restarts.take_due(time.monotonic()):
                self._start_process(self._processes[name].spec.again())
            time.sleep(POLL)
        names = ", ".join(process.name for process in reversed(self._processes.values()) if process.running)
        self._view.say(f"{signal.Signals(self._signals[0]).name}: stopping {names or 'while nothing runs'}")
        return 128 + self._signals[0]

    def _read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)
        self._restarts.look(self.history)
        self._statuses = read_status(self._run.status)
        for status in self._statuses.values():
            for notice in status.notices[self._notices_said[status.pid] :]:
                self._view.say(f"{status.process}: {notice}")
            self._notices_said[status.pid] = len(status.notices)

    def _bury(self, ended: list[Process]) -> None:
        """Plan to start again what died; raise if that would not help."""
        died = [p for p in ended if p.exit_status != 0 or p.spec.service or self._has_failed(p)]
        died = [process for process in died if not self._restarts.is_planned(process.name)]
        if not all(self._may_start_again(process) for process in died):
            error = InputRefused if any(process.refused_input for process in died) else LaunchError
            raise error("\n".join(map(self._obituary, died)))
        for process in died:
            process.kill()  # what it had started, too
            self._clear_traces(process)
            delay = self._restarts.plan(process.name, time.monotonic())
            when = f"starting it again in {delay:g} s" if delay else "starting it again"
            attempt = f"{self._restarts.in_a_row[process.name]} of {self._restarts.most}"
            self._view.say(f"{process.name} {process.how_it_ended()}; {when} ({attempt})")

    def _may_start_again(self, process: Process) -> bool:
        """One that had reported its failure is beyond help, whatever ended it then."""
        lost = process.asks_to_start_again or (process.was_killed and not self._has_failed(process))
        return lost and self._restarts.allows(process.name)

    def _has_failed(self, process: Process) -> bool:
        """Whether it has said so itself."""
        if process in self._condemned:
            return True
        status = self._statuses.get(process.name)
        return status is not None and status.pid == process.pid and status.state == "failed"

    def _clear_traces(self, process: Process) -> None:
        """Remove what says that a dead process lives: its status, and the address it listened on."""
        ranks = (self._run.status / "ranks").glob(f"{process.name}-*.json")
        for status in (self._run.status / f"{process.name}.json", *ranks):
            status.unlink(missing_ok=True)
        withdraw_endpoint(self._run.endpoints / f"{process.name}.json", process.pid)

    def _obituary(self, process: Process) -> str:
        head = f"{process.name} {process.how_it_ended()}"
        if restarts := self._restarts.in_a_row.get(process.name):
            times = "once" if restarts == 1 else f"{restarts} times"
            head += f", after it had been started again {times} without progress"
        lines = [f"    {line}" for line in process.last_lines()]
        return "\n".join([f"{head}; the end of {process.log}:", *lines] if lines else [f"{head} and wrote no log"])

    def _check(self, running: list[Process]) -> None:
        """Raise if a process does not come up; say what looks wrong but may pass."""
        now = time.time()
        names = [process.name for process in running]
        self._up.update(name for name in names if is_up(self._statuses.get(name)))
        missing = not_up([name for name in names if name not in self._up], self._statuses, now)
        if missing and time.monotonic() - self._started > self._start_timeout:
            limit = f"not up after {self._start_timeout:.0f} s (launch.start_timeout)"
            raise LaunchError(f"{limit}: {', '.join(missing)}; their logs are in {self._run.logs}")
        alive = {name: status for name, status in self._statuses.items() if name in names}
        for sentence in self._watch.look(now, self.history.moves, alive, self.history.step_seconds):
            self._view.say(sentence)
        for process in running:
            status = alive.get(process.name)
            if status is not None and status.state == "failed" and now - status.time > self._stop_timeout:
                # It has failed, but some thread, or another rank, does not let go; the next look buries it.
                self._condemned.add(process)
                process.kill()

    def _stop(self) -> None:
        """End what still runs, last started first. A second signal ends the patience."""
        for process in reversed(self._processes.values()):
            process.terminate()
            deadline = time.monotonic() + self._stop_timeout
            while process.running and time.monotonic() < deadline and len(self._signals) < 2:
                time.sleep(0.02)
            if process.running:
                self._view.say(f"{process.name} does not end and is killed")
            process.kill()  # even if it has ended: something that it started may not have
            process.wait(self._stop_timeout)
        self._read()


@contextmanager
def signals_to(received: list[int]) -> Iterator[None]:
    """Collect the signals that ask to stop instead of dying of them."""

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
