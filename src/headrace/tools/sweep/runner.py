"""Runs the runs of a sweep: each a `headrace rl` of its own, as many at once as there are shares of the machine.

A run that fails is continued once from where it was; if that fails, too, it is told and the others go on. Whatever ends
the sweep ends its runs, in order where there is time: they notice a killed sweep by their lifelines, and hold its lock
until they are gone.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.launch.placement import gpu_env
from headrace.launch.process import Lifeline, Process, ProcessSpec
from headrace.launch.run_directory import is_run
from headrace.launch.supervisor import signals_to
from headrace.tools.sweep.budget import Share, of_its_own
from headrace.tools.sweep.jobs import Job
from headrace.tools.sweep.progress import Progress, View
from headrace.tools.sweep.words import words

POLL = 0.2
STOPPING = 60.0
"""Seconds that runs get to end in order: each ends three processes, one after the other."""
ATTEMPTS = 2
BAD_INPUT = 2
"""The exit status of a command that cannot be done as asked; asking again does not help."""


class _Started(NamedTuple):
    job: Job
    process: Process
    share: Share


OnEnd = Callable[[str, Literal["finished", "failed"], str], None]
"""Told of a run's name, how it ended, and why it failed."""


class Runner:
    """`progress` has the jobs' runs by name."""

    def __init__(
        self,
        jobs: Sequence[Job],
        shares: Sequence[Share],
        logs: Path,
        progress: Mapping[str, Progress],
        view: View,
        on_end: OnEnd,
        inherited: Sequence[int] = (),
    ) -> None:
        self._waiting, self._free = deque(jobs), list(shares)
        self._logs, self._progress, self._view, self._on_end = logs, progress, view, on_end
        self._inherited = inherited
        self._lifeline = Lifeline()
        self._running: dict[str, _Started] = {}
        self._attempts: Counter[str] = Counter()
        self._signals: list[int] = []
        self._is_stopping = False

    def run(self) -> int:
        """0 once every run has ended, however it ended; 128 + signal when the sweep was interrupted."""
        with signals_to(self._signals):
            try:
                while (self._waiting or self._running) and not self._signals:
                    while self._waiting and self._free:
                        self._start(self._waiting.popleft(), self._free.pop(0))
                    self._look()
                    self._view.show()
                    time.sleep(POLL)
            finally:
                self._stop()
                self._view.close()
                self._lifeline.close()
        return 128 + self._signals[0] if self._signals else 0

    def _start(self, job: Job, share: Share) -> None:
        resume = ["--resume"] if is_run(job.directory) else []
        own = words(of_its_own(job.config, share))
        argv = [sys.executable, "-m", "headrace", *job.words, *own, *resume]
        spec = ProcessSpec(job.name, argv, {"PYTHONUNBUFFERED": "1", **gpu_env(share.gpus)})
        self._attempts[job.name] += 1
        process = Process(spec, self._logs / f"{job.name}.log", self._lifeline, self._inherited)
        self._running[job.name] = _Started(job, process, share)
        self._progress[job.name].state = "running"
        self._view.say(f"{job.name}: {'continued' if resume else 'started'}")

    def _look(self) -> None:
        for name, (job, process, share) in list(self._running.items()):
            ended = not process.running  # before its metrics are read: the last of them are then there
            self._progress[name].read()
            if not ended:
                continue
            del self._running[name]
            self._free.append(share)
            process.kill()  # what it may have left
            self._settle(job, process)

    def _settle(self, job: Job, process: Process) -> None:
        """What an end means: done, once more, or given up."""
        run = self._progress[job.name]
        if process.exit_status == 0:
            run.state = "finished"
            self._view.say(f"{job.name}: finished after {run.history.step} steps, {run.value or 'nothing reported'}")
            self._on_end(job.name, "finished", "")
            return
        if self._is_stopping:
            run.state = "unfinished"
            return
        failure = _failure(process)
        if process.exit_status != BAD_INPUT and self._attempts[job.name] < ATTEMPTS:
            run.state = "waiting"
            self._waiting.appendleft(job)
            self._view.say(f"{job.name}: {process.how_it_ended()}; it is continued once")
            return
        run.state = "failed"
        self._view.say(f"{job.name}: failed: {failure}")
        self._on_end(job.name, "failed", failure)

    def _stop(self) -> None:
        """End what still runs, all at the same time. A second signal ends the patience."""
        self._is_stopping = True
        if self._running:
            self._view.say(f"stopping {', '.join(self._running)}; the same command goes on")
        for started in self._running.values():
            started.process.terminate()
        deadline = time.monotonic() + STOPPING
        while self._running and time.monotonic() < deadline and len(self._signals) < 2:
            self._look()
            self._view.show()
            time.sleep(POLL)
        for started in self._running.values():
            started.process.kill()
            started.process.wait(STOPPING)


def _failure(process: Process) -> str:
    lines = "\n".join(f"    {line}" for line in process.last_lines())
    return f"{process.how_it_ended()}; the end of {process.log}:\n{lines}"
