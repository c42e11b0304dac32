"""Starts the processes of a run, watches over them, and ends them all in order whatever happens.

Left out on purpose: restarting a process that died. The run directory loses nothing, so the launcher says what
happened and the person (or a cluster's scheduler) starts it again with `--resume`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from headrace.launch.errors import LaunchError
from headrace.launch.lifeline import Lifeline
from headrace.launch.process import Process, ProcessSpec
from headrace.launch.watch import PATIENCE, Watch, not_up
from headrace.observe.history import History, Tail
from headrace.observe.status import ProcessStatus, read_status
from headrace.observe.terminal import View
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
        patience: float = PATIENCE,
        inherited: Sequence[int] = (),
    ) -> None:
        self.history = History()
        self._specs, self._run, self._view = specs, run, view
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._inherited = inherited
        self._tail = Tail(run.metrics)
        self._lifeline = Lifeline()
        self._processes: list[Process] = []
        self._statuses: dict[str, ProcessStatus] = {}
        self._signals: list[int] = []
        self._watch = Watch(time.time(), patience)

    def run(self) -> int:
        """0 when the work is done, 128 + signal when it was interrupted; raises `LaunchError` when a process failed."""
        with _signals_to(self._signals):
            try:
                self._start()
                return self._supervise()
            finally:
                try:
                    self._stop()
                finally:
                    self._view.close(self.history, self._statuses)
                    self._lifeline.close()

    def _start(self) -> None:
        for stale in (*self._run.status.glob("*.json"), self._run.endpoint):
            stale.unlink(missing_ok=True)
        self._read()
        self._started = time.time()
        self._moves_before = self.history.moves
        self._view.say(f"starting {', '.join(spec.name for spec in self._specs)}; logs in {self._run.logs}")
        for spec in self._specs:
            log = self._run.logs / f"{spec.name}.log"
            self._processes.append(Process(spec, log, self._lifeline, self._inherited))

    def _supervise(self) -> int:
        while not self._signals:
            # Before the news are read: what a process reported before it ended is then always among them.
            running = [process for process in self._processes if process.running]
            self._read()
            self._view.show(self.history, self._statuses)
            self._check(running)
            if all(process.spec.service for process in running):
                return 0
            time.sleep(POLL)
        names = ", ".join(process.name for process in reversed(self._processes) if process.running)
        self._view.say(f"{signal.Signals(self._signals[0]).name}: stopping {names}")
        return 128 + self._signals[0]

    def _read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)
        self._statuses = read_status(self._run.status)

    def _check(self, running: list[Process]) -> None:
        """Raise if the run cannot go on; say what looks wrong but may pass."""
        now = time.time()
        ended = [process for process in self._processes if process not in running]
        if failed := [process for process in ended if process.exit_status != 0 or process.spec.service]:
            raise LaunchError("\n".join(_obituary(process) for process in failed))
        names = [process.name for process in running]
        late = now - self._started > self._start_timeout and self.history.moves == self._moves_before
        if late and (missing := not_up(names, self._statuses, now)):
            limit = f"not up after {self._start_timeout:.0f} s (launch.start_timeout)"
            raise LaunchError(f"{limit}: {', '.join(missing)}; their logs are in {self._run.logs}")
        alive = {name: status for name, status in self._statuses.items() if name in names}
        for sentence in self._watch.look(now, self.history.moves, alive):
            self._view.say(sentence)
        for process in running:
            status = alive.get(process.name)
            if status is not None and status.state == "failed" and now - status.time > self._stop_timeout:
                process.kill()  # it has failed but some thread of it does not let go; the next look reports it

    def _stop(self) -> None:
        """End what still runs, last started first. A second signal ends the patience."""
        for process in reversed(self._processes):
            process.terminate()
            deadline = time.monotonic() + self._stop_timeout
            while process.running and time.monotonic() < deadline and len(self._signals) < 2:
                time.sleep(0.02)
            if process.running:
                self._view.say(f"{process.name} does not end and is killed")
            process.kill()  # even if it has ended: something that it started may not have
            process.wait(self._stop_timeout)
        self._read()


def _obituary(process: Process) -> str:
    lines = [f"    {line}" for line in process.last_lines()]
    head = f"{process.name} {process.how_it_ended()}"
    return "\n".join([f"{head}; the end of {process.log}:", *lines] if lines else [f"{head} and wrote no log"])


@contextmanager
def _signals_to(received: list[int]) -> Iterator[None]:
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
