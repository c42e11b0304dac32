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

from headrace.errors import BAD_INPUT
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.process import Lifeline, Process
from headrace.launch.processes import gpu_env
from headrace.launch.run_directory import is_run
from headrace.launch.signals import signals_to
from headrace.tools.evaluate.servers import Machine
from headrace.tools.sweep.config import SweepConfig, override_words
from headrace.tools.sweep.jobs import Job, Share, check_engines, divide
from headrace.tools.sweep.progress import RunProgress, SweepView
from headrace.tools.sweep.record import SweepRecord, state_of, write_record

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
