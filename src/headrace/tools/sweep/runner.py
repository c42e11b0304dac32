"""Runs the jobs of a sweep: each is a `headrace rl` process, as many at once as there are shares of the machine.

A run that fails is resumed once; if it fails again, the failure is recorded and the other runs go on. When the sweep
ends, it stops its runs. Runs notice by their lifelines that a sweep was killed, and hold its lock until they end.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.errors import BAD_INPUT
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.process import Lifeline, Process, signals_to
from headrace.launch.processes import gpu_env
from headrace.launch.run_directory import is_run
from headrace.observe.console import SafeConsole
from headrace.observe.metrics import History, Tail
from headrace.observe.status import duration
from headrace.observe.terminal import LiveRegion
from headrace.safe_text import CONTINUATION
from headrace.tools.evaluate.servers import Machine
from headrace.tools.sweep.config import SweepConfig, override_words
from headrace.tools.sweep.jobs import Job, Share, check_engines, divide
from headrace.tools.sweep.record import State, SweepRecord, state_of, write_record
from headrace.transport.run_dir import RunDir

LOGS = "logs"
"""The folder of the launchers' output; a run's own folder must be empty when it starts."""
POLL_S = 0.2
STOP_TIMEOUT_S = 60.0
"""Each run stops three processes, one after the other."""
MAX_ATTEMPTS = 2


def divide_machine(sweep: SweepConfig, jobs: Sequence[Job]) -> list[Share]:
    """Return a share of this machine for each run at a time; raises `ConfigError` if the runs need the same engines."""
    shares = divide(Machine.local(), sweep.parallel, sweep.gpus_per_run, len(jobs))
    check_engines(jobs, len(shares))
    return shares


class _Started(NamedTuple):
    job: Job
    process: Process
    share: Share


class Runner:
    """Runs the unfinished jobs and records the outcome of each. `lock` is the sweep's lock, which its runs inherit."""

    def __init__(
        self, sweep: SweepConfig, record: SweepRecord, directory: Path, jobs: Sequence[Job], lock: int
    ) -> None:
        self._record, self._directory, self._lock = record, directory, lock
        self._progress = {
            run.name: RunProgress(run.name, directory / run.name, state_of(run, directory), run.max_steps)
            for run in record.planned
        }
        left = [job for job in jobs if self._progress[job.name].state != "finished"]
        self._waiting, self._free = deque(left), divide_machine(sweep, left)
        self._view = SweepView(directory.name, [*self._progress.values()])
        logs = directory / LOGS
        self._view.say(f"{len(left)} of {len(jobs)} runs are left, {len(self._free)} at once; logs in {logs}")
        self._lifeline = Lifeline()
        self._running: dict[str, _Started] = {}
        self._attempts: Counter[str] = Counter()
        self._signals: list[int] = []
        self._is_stopping = False

    def run(self) -> int:
        """Return 0 when every run has ended, also with a failure; 128 + signal if the sweep was interrupted."""
        with signals_to(self._signals):
            try:
                while (self._waiting or self._running) and not self._signals:
                    while self._waiting and self._free:
                        self._start(self._waiting.popleft(), self._free.pop(0))
                    self._poll()
            finally:
                self._stop()
                self._view.close()
                self._lifeline.close()
        return 128 + self._signals[0] if self._signals else 0

    def _start(self, job: Job, share: Share) -> None:
        resume = ["--resume"] if is_run(job.directory) else []
        overrides = override_words(share.overrides(job.config))
        argv = [sys.executable, "-m", "headrace", *job.words, *overrides, *resume]
        spec = ProcessSpec(job.name, argv, {"PYTHONUNBUFFERED": "1", **gpu_env(share.gpus)})
        self._attempts[job.name] += 1
        process = Process(spec, self._directory / LOGS / f"{job.name}.log", self._lifeline, (self._lock,))
        self._running[job.name] = _Started(job, process, share)
        self._progress[job.name].state = "running"
        self._view.say(f"{job.name}: {'continued' if resume else 'started'}")

    def _poll(self) -> None:
        """Read new metrics, handle runs that have ended, refresh the view, and wait."""
        for name, (job, process, share) in list(self._running.items()):
            ended = not process.running  # checked before reading, so that the last metrics are read
            self._progress[name].read()
            if ended:
                del self._running[name]
                self._free.append(share)
                process.kill()  # remaining child processes
                self._on_end(job, process)
        self._view.show()
        time.sleep(POLL_S)

    def _on_end(self, job: Job, process: Process) -> None:
        """Record a finished run; resume a failed one, or record its failure."""
        run = self._progress[job.name]
        if process.exit_status == 0:
            self._view.say(f"{job.name}: finished after {run.history.step} steps, {run.value or 'nothing reported'}")
            self._write_outcome(job.name, "finished", "")
        elif self._is_stopping:
            run.state = "unfinished"
        elif process.exit_status != BAD_INPUT and self._attempts[job.name] < MAX_ATTEMPTS:
            run.state = "waiting"
            self._waiting.appendleft(job)
            self._view.say(f"{job.name}: {process.how_it_ended()}; it is continued once")
        else:
            lines = "\n".join(f"    {line}" for line in process.last_lines())
            failure = f"{process.how_it_ended()}; the end of {process.log}:\n{lines}"
            self._view.say(f"{job.name}: failed: {failure}")
            self._write_outcome(job.name, "failed", failure)

    def _write_outcome(self, name: str, outcome: Literal["finished", "failed"], failure: str) -> None:
        self._progress[name].state = outcome
        run = self._record.runs[name]
        run.outcome, run.failure = outcome, failure
        write_record(self._directory, self._record)

    def _stop(self) -> None:
        """Terminate all runs at the same time; kill them at a second signal or after `STOP_TIMEOUT_S`."""
        self._is_stopping = True
        if self._running:
            self._view.say(f"stopping {', '.join(self._running)}; the same command goes on")
        for started in self._running.values():
            started.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._running and time.monotonic() < deadline and len(self._signals) < 2:
            self._poll()
        for started in self._running.values():
            started.process.kill()
            started.process.wait(STOP_TIMEOUT_S)


REFRESH_S = 0.5
PLAIN_INTERVAL_S = 30.0
"""Time between lines about running runs where there is no terminal."""
MAX_ROWS = 20
"""Of more runs, only those that are running or have failed are shown."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green", "unfinished": "yellow", "waiting": "dim"}


class RunProgress:
    """One run; `read` adds its new metrics."""

    def __init__(self, name: str, directory: Path, state: State, max_steps: int | None) -> None:
        self.name, self.state, self.max_steps = name, state, max_steps
        self.history = History()
        self._tail = Tail(RunDir(directory).metrics)
        self.read()

    def read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)

    @property
    def steps(self) -> str:
        return str(self.history.step) if self.max_steps is None else f"{self.history.step}/{self.max_steps}"

    @property
    def value(self) -> str:
        """The newest reward, or the loss of supervised training."""
        if reward := self.history.train_reward():
            return f"{reward[-1][1]:.3f}"
        loss = self.history.loss()
        return f"loss {loss[-1][1]:.4f}" if loss else ""

    @property
    def time(self) -> str:
        seconds = float(self.history.latest.get("progress/seconds", self.history.elapsed))
        return duration(seconds) if seconds else ""


class SweepView:
    """Shows the progress of all runs; messages of `say` stay visible."""

    def __init__(self, title: str, runs: Sequence[RunProgress], console: Console | None = None) -> None:
        self._title, self._runs = title, runs
        self._console = console or SafeConsole()
        self._next = 0.0
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = LiveRegion(self._console) if live else None

    def show(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (REFRESH_S if self._live is not None else PLAIN_INTERVAL_S)
        if self._live is not None:
            self._live.draw(progress_table(self._title, self._runs))
        elif running := [run for run in self._runs if run.state == "running" and run.history.step]:
            parts = [f"{run.name} {run.steps} {run.value}" for run in running]
            self.say("; ".join([count_finished(self._runs), *parts]))

    def say(self, message: str) -> None:
        if self._live is not None:
            self._live.say(message)
        else:  # soft_wrap: one line of a log file or a pipe stays one line
            self._console.print(Text(message.replace("\n", CONTINUATION)), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.finish(progress_table(self._title, self._runs))


def count_finished(runs: Sequence[RunProgress]) -> str:
    """Return `3 of 8 finished, 1 failed`."""
    failed = sum(run.state == "failed" for run in runs)
    finished = f"{sum(run.state == 'finished' for run in runs)} of {len(runs)} finished"
    return f"{finished}, {failed} failed" if failed else finished


def progress_table(title: str, runs: Sequence[RunProgress]) -> Table:
    table = Table("run", "state", title=Text(f"{title}: {count_finished(runs)}"), title_justify="left")
    for column in ("step", "reward", "time"):
        table.add_column(column, justify="right")
    for run in runs:
        if len(runs) <= MAX_ROWS or run.state in ("running", "failed"):
            table.add_row(Text(run.name), Text(run.state, style=STYLES[run.state]), run.steps, run.value, run.time)
    return table
