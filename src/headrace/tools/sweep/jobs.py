"""The runs of a sweep as commands with validated configurations, and the share of the machine that each gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.config.base import ConfigError
from headrace.config.sft import OfflineConfig
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.evaluate.servers import Machine
from headrace.tools.sweep.config import override_words
from headrace.tools.sweep.plan import PlannedRun

RUN_BYTES = 3 << 30
"""Memory of a run of a small model without a GPU, in three processes."""


class Job(NamedTuple):
    name: str
    directory: Path
    words: Sequence[str]
    """The command line, without `--resume` and the share of the machine."""
    config: RunConfig | OfflineConfig


def default_directory(
    common: Mapping[str, Any], kind: type[RunConfig] | type[OfflineConfig], files: Sequence[Path], sweep: Sequence[Path]
) -> Path:
    """Return `artifacts/sweeps/NAME` of the run file's storage root, with the name of the sweep's files."""
    config, _ = load(kind, files, override_words(common))
    if (root := config.launch.storage_root) is None:
        raise ConfigError(
            "required, since the run file has no storage.cache_dir",
            key="output_dir",
            fix="Set it to the folder for the runs of the sweep.",
            file=" + ".join(map(str, sweep)),
        )
    return root / "artifacts" / "sweeps" / "-".join(file.stem for file in sweep)


def make_jobs(
    runs: Mapping[str, PlannedRun],
    common: Mapping[str, Any],
    kind: type[RunConfig] | type[OfflineConfig],
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

    def overrides(self, config: RunConfig | OfflineConfig) -> dict[str, Any]:
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
            raise ConfigError(
                "these engines serve one run at a time",
                key="orchestrator.client.base_url",
                fix="Set parallel to 1, or leave base_url out and let every run start its own.",
            )
