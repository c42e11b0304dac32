"""From checked jobs to ended runs: those that are left, on this machine, with what came of each written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headrace.launch.local import half_the_cores
from headrace.machine import free_memory, visible_gpus
from headrace.tools.sweep.budget import Machine, Share, check_engines, shares
from headrace.tools.sweep.file import SweepConfig
from headrace.tools.sweep.jobs import Job
from headrace.tools.sweep.progress import Progress, View
from headrace.tools.sweep.record import SweepRecord, state_of, write_record
from headrace.tools.sweep.runner import Runner

LOGS = "logs"
"""The folder of what the runs' launchers say; not in theirs, which must be empty for a run to start."""


def shares_of(sweep: SweepConfig, jobs: Sequence[Job]) -> list[Share]:
    """What each of these gets of this machine; refuses what cannot be had by several at once."""
    machine = Machine(visible_gpus(), half_the_cores(), free_memory())
    found = shares(machine, sweep.parallel, sweep.gpus_per_run, len(jobs))
    for job in jobs:
        check_engines(job.config, len(found))
    return found


def run_jobs(sweep: SweepConfig, record: SweepRecord, directory: Path, jobs: Sequence[Job], held: int) -> int:
    """Run what is not finished; 0, or 128 + signal. `held` is the sweep's lock, which its runs hold as well."""
    progress = {
        run.name: Progress(run.name, directory / run.name, state_of(run, directory), run.max_steps)
        for run in record.asked
    }
    for seen in progress.values():
        seen.read()
    left = [job for job in jobs if progress[job.name].state != "finished"]

    def on_end(name: str, outcome: Literal["finished", "failed"], failure: str) -> None:
        record.runs[name].outcome, record.runs[name].failure = outcome, failure
        write_record(directory, record)

    portions = shares_of(sweep, left)
    view = View(directory.name, [*progress.values()])
    view.say(f"{len(left)} of {len(jobs)} runs are left, {len(portions)} at once; logs in {directory / LOGS}")
    return Runner(left, portions, directory / LOGS, progress, view, on_end, inherited=(held,)).run()
