"""The runs of a sweep as commands, each loaded as `headrace rl` will load it, so that nothing starts that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.base import ConfigError, load
from headrace.config.run import RunConfig
from headrace.config.sft import SftConfig
from headrace.sweep.plan import Planned
from headrace.sweep.words import words

RUNS = ("artifacts", "runs")
"""Where a run goes under a storage root."""


class Job(NamedTuple):
    name: str
    directory: Path
    words: Sequence[str]
    """Of the command line, without where it may continue and what it gets of the machine."""
    config: RunConfig | SftConfig


def default_directory(
    common: Mapping[str, Any], kind: type[RunConfig] | type[SftConfig], files: Sequence[Path], sweep: Sequence[Path]
) -> Path:
    """Among the sweeps of the storage root, if the run goes among its runs; it is called as the sweep's files are."""
    config, _ = load(kind, files, words(common))
    if config.output_dir is None or config.output_dir.parts[-3:-1] != RUNS:
        where = " + ".join(map(str, sweep))
        raise ConfigError(f"{where}: output_dir: say where the sweep shall keep its runs")
    return config.output_dir.parents[1] / "sweeps" / "-".join(file.stem for file in sweep)


def jobs_of(
    runs: Mapping[str, Planned],
    common: Mapping[str, Any],
    kind: type[RunConfig] | type[SftConfig],
    files: Sequence[Path],
    directory: Path,
) -> list[Job]:
    """`common` are overrides of all runs. Raises `ConfigError` with the name of the run that cannot be."""
    command = "rl" if kind is RunConfig else "sft"
    jobs = []
    for name, run in runs.items():
        folder = directory / name
        overrides = words({**run.overrides(common), "output_dir": str(folder.absolute())})
        try:
            config, _ = load(kind, files, overrides)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        jobs.append(Job(name, folder, [command, *map(str, files), *overrides], config))
    return jobs
