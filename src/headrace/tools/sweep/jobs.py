"""The runs of a sweep as commands with validated configurations, and the share of the machine that each gets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.config.base import ConfigError
from headrace.launch.processes import needs_of
from headrace.launch.slurm_job import JobSize, batch_script, headrace_command
from headrace.runfile.reading import load
from headrace.runfile.run import AnyRun, RunConfig
from headrace.tools.evaluate.servers import Machine
from headrace.tools.sweep.config import override_words
from headrace.tools.sweep.plan import PlannedRun

RUN_BYTES = 3 << 30
"""Memory of a run of a small model without a GPU, in three processes."""


class Job(NamedTuple):
    """A run of a sweep as a command."""

    name: str
    directory: Path
    words: Sequence[str]
    """The command line, without `--resume` and the share of the machine."""
    config: AnyRun


def default_directory(
    common: Mapping[str, Any], kind: type[AnyRun], files: Sequence[Path], sweep: Sequence[Path]
) -> Path:
    """Return `artifacts/sweeps/NAME` of the run file's storage root, with the name of the sweep's files."""
    config, _ = load(kind, files, override_words(common))
    if (root := config.launch.storage_root) is None:
        fact = "required, since the run file has no storage.cache_dir"
        fix = "Set it to the folder for the runs of the sweep."
        raise ConfigError(fact, key="output_dir", fix=fix, file=" + ".join(map(str, sweep)))
    return root / "artifacts" / "sweeps" / "-".join(file.stem for file in sweep)


def make_jobs(
    runs: Mapping[str, PlannedRun],
    common: Mapping[str, Any],
    kind: type[AnyRun],
    files: Sequence[Path],
    directory: Path,
) -> list[Job]:
    """Load the configuration of every run; raises `ConfigError` with the name of a run that is invalid."""
    jobs = []
    for name, run in runs.items():
        folder = directory / name
        overrides = override_words({**run.overrides(common), "output_dir": str(folder.absolute())})
        try:
            config, _ = load(kind, files, overrides)
        except ConfigError as error:
            for problem in error.problems:
                problem.fact = f"{problem.fact.rstrip('.')} (in run {name})"
            raise
        jobs.append(Job(name, folder, [kind.COMMAND, *map(str, files), *overrides], config))
    return jobs


class Share(NamedTuple):
    """The part of the machine that one run gets."""

    gpus: Sequence[str]
    threads: int | None
    """Threads of each process that computes; None: as many as a single run has."""

    def overrides(self, config: AnyRun) -> dict[str, Any]:
        """Return the overrides with which runs at the same time do not compete for cores and ports."""
        overrides: dict[str, Any] = {}
        if self.threads is None:
            return overrides
        if config.launch.threads is None:
            overrides["launch.threads"] = self.threads
        if config.inference.port:
            overrides["inference.port"] = 0
        if isinstance(config, RunConfig) and config.trainer.weights.port:
            overrides["trainer.weights.port"] = 0
        return overrides


def divide(machine: Machine, parallel: int | Literal["auto"], gpus_per_run: int, runs: int) -> list[Share]:
    """Return a share for each run at a time. If `parallel` is more than the GPUs allow, runs share GPUs."""
    gpus = machine.gpus
    if gpus and gpus_per_run > len(gpus):
        raise ConfigError(f"{len(gpus)} GPUs are visible", key="gpus_per_run", value=gpus_per_run)
    starts = range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)
    gpu_sets = [gpus[start : start + gpus_per_run] for start in starts] or [()]
    cores = machine.cores // 2  # a run computes in two processes, the trainer and the server
    capacity = len(gpu_sets) if gpus else min(cores, machine.memory // RUN_BYTES)
    count = max(1, min(runs, capacity if parallel == "auto" else parallel))
    threads = max(1, cores // count) if count > 1 else None
    return [Share(gpu_sets[number % len(gpu_sets)], threads) for number in range(count)]


def check_engines(jobs: Sequence[Job], parallel: int) -> None:
    """Raise `ConfigError` if runs at the same time use the same external engines, which have one policy's weights."""
    for job in jobs:
        if parallel > 1 and isinstance(job.config, RunConfig) and job.config.orchestrator.client.base_url:
            fix = "Set parallel to 1, or leave base_url out and let every run start its own."
            raise ConfigError("these engines serve one run at a time", key="orchestrator.client.base_url", fix=fix)


SCRIPT = "slurm.sh"


def array_script(jobs: Sequence[Job], directory: Path, parallel: int | Literal["auto"]) -> str:
    """Return the batch script; a run that exists is resumed. Raises `ConfigError` if the runs differ in `[launch]`."""
    launch = jobs[0].config.launch
    if any(job.config.launch != launch for job in jobs):
        fix = "Run them as sweeps of their own."
        raise ConfigError("the tasks of a job array have one size and one time limit", key="launch", fix=fix)
    size = JobSize(needs_of(jobs[0].config).nodes, launch.gpus_per_node)
    limit = "" if parallel == "auto" else f"%{parallel}"
    logs = directory.resolve() / "logs"
    cases = ""
    for number, job in enumerate(jobs):
        words = shlex.join([*job.words, *override_words({"inference.port": 0})])  # tasks may share a host
        cases += f"  {number}) run={shlex.quote(str(job.directory.resolve()))}; set -- {words} ;;\n"
    commands = (
        f"case $SLURM_ARRAY_TASK_ID in\n{cases}esac\n"
        '[ ! -e "$run/config.toml" ] || set -- "$@" --resume\n'
        f'exec {headrace_command()} "$@"'
    )
    array = [f"--array=0-{len(jobs) - 1}{limit}"]
    return batch_script(launch.slurm, f"headrace-{directory.name}", logs / "slurm-%a.log", size, commands, array)
