"""The runs of a sweep as a job array of SLURM: one task per run, each with hosts of its own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headrace.config.base import ConfigError
from headrace.launch.processes import needs_of
from headrace.launch.slurm_job import JobSize, batch_script, headrace_command
from headrace.tools.sweep.config import override_words
from headrace.tools.sweep.jobs import Job

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
