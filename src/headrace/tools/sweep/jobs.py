"""The runs of a sweep as commands, each loaded as `headrace rl` will load it, so that nothing starts that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.base import ConfigError
from headrace.config.sft import SftConfig
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.sweep.plan import Planned
from headrace.tools.sweep.words import words


class Job(NamedTuple):
    name: str
    directory: Path
    words: Sequence[str]
    """Of the command line, without where it may continue and what it gets of the machine."""
    config: RunConfig | SftConfig


def default_directory(
    common: Mapping[str, Any], kind: type[RunConfig] | type[SftConfig], files: Sequence[Path], sweep: Sequence[Path]
) -> Path:
    """Return `artifacts/sweeps/NAME` of the run file's storage root, with the name of the sweep's files."""
    config, _ = load(kind, files, words(common))
    if (root := config.launch.storage_root) is None:
        raise ConfigError(
            "required, since the run file has no storage.cache_dir",
            key="output_dir",
            fix="Set it to the folder for the runs of the sweep.",
            file=" + ".join(map(str, sweep)),
        )
    return root / "artifacts" / "sweeps" / "-".join(file.stem for file in sweep)


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
            for problem in error.problems:
                problem.fact = f"{problem.fact.rstrip('.')} (in run {name})"
            raise
        jobs.append(Job(name, folder, [command, *map(str, files), *overrides], config))
    return jobs
