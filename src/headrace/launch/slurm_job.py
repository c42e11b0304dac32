"""The batch job of a run on SLURM: its script, its submission, and what a run inside of a job asks SLURM for.

The script is written into the run directory, to be read and to be submitted by hand. It starts the launcher on the
first host of the job; `launch/hosts/slurm.py` starts a node agent on each host from there.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.config.launch import SlurmConfig
from headrace.launch.errors import BadRequest
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

JOB_VAR = "SLURM_JOB_ID"
"""Set inside of an allocation: by sbatch and by salloc."""
NODES_VAR = "SLURM_JOB_NUM_NODES"
RESTARTS_VAR = "SLURM_RESTART_COUNT"
SCRIPT = "slurm.sh"
SUBMITTED = re.compile(r"^(\d+)(;.*)?$")
"""What `sbatch --parsable` prints: the job, and the cluster if there are several."""
NAME_CHARS = re.compile(r"[^A-Za-z0-9._-]+")
WATCH_INTERVAL_S = 10.0
SILENT_S = 30.0
"""Age of the heartbeat, which is written every 5 s, from which on SLURM is asked for the launcher's host."""
REQUEUE_VAR = "HEADRACE_SLURM_REQUEUE"
"""Set in a batch job that may be queued again."""
REQUEUE_EARLY = f"""
export {REQUEUE_VAR}=1
trap 'scontrol requeue "$SLURM_JOB_ID"; exit' USR1  # the time limit comes before the run has started
"""
LATER = "--begin=now+1hour"
TIMEOUT_S = 60.0
"""Time for SLURM's own commands, which wait for a controller that is busy."""


class JobSize(NamedTuple):
    nodes: int
    gpus_per_node: int | None


def in_allocation() -> bool:
    return JOB_VAR in os.environ


def batch_script(
    slurm: SlurmConfig, name: str, log: Path, size: JobSize, commands: str, extra: Sequence[str] = ()
) -> str:
    """Return a script for sbatch. `extra` and the user's own lines come last: of two equal options the last counts."""
    options = {
        "job-name": NAME_CHARS.sub("-", name),
        "nodes": size.nodes,
        "ntasks-per-node": 1,
        "gres": None if size.gpus_per_node is None else f"gpu:{size.gpus_per_node}",
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "signal": f"B:USR1@{slurm.signal_before}",
        "output": log,
        "open-mode": "append",
    }
    words = {option: str(value) for option, value in options.items() if value is not None}
    # Of the shell, sbatch understands quotes in a script, and nothing else.
    lines = [
        f'--{option}="{word}"' if re.search(r"\s", word) else f"--{option}={word}" for option, word in words.items()
    ]
    lines += ["--no-kill", "--requeue" if slurm.requeue else "--no-requeue", *extra, *slurm.lines]
    before = REQUEUE_EARLY if slurm.requeue else ""
    before += f"\n{slurm.prologue.rstrip()}\n" if slurm.prologue.strip() else ""
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + f"{before}\n{commands}\n"


def headrace_command(*words: str) -> str:
    """Return the shell command of `headrace WORDS`; a prologue can set HEADRACE, for example for a container."""
    own = shlex.join([sys.executable, "-m", "headrace"])
    return " ".join([f"${{HEADRACE:-{own}}}", *map(shlex.quote, words)])


def run_script(run: RunDir, command: str, slurm: SlurmConfig, size: JobSize) -> str:
    """Return the script of a run; `command` is rl or sft. It takes whole hosts, unless the user's lines differ."""
    root = run.root.resolve()
    start = f"exec {headrace_command(command, str(root / run.config.name), '--resume')}"
    return batch_script(slurm, f"headrace-{root.name}", log_of(run), size, start, ["--exclusive", "--mem=0"])


def log_of(run: RunDir) -> Path:
    return run.logs.resolve() / "slurm.log"


@contextmanager
def submitted(script: str) -> Iterator[str]:
    """Submit a script, yield the id of its job, and let the job start after the block; cancel it if the block fails.

    So a refused job changes nothing, and a job never starts before its files are there. It is not held meanwhile:
    SLURM does not check whether a held job fits.
    """
    job = submit(script, LATER)
    try:
        yield job
        _run_slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    except BaseException:
        _run_slurm("scancel", job)
        raise


def submit(script: str, *options: str) -> str:
    """Submit a script and return the id of its job. Raises `BadRequest` with SLURM's own message."""
    done = _run_slurm("sbatch", "--parsable", *options, script=script)
    words = SUBMITTED.match(done)
    if words is None:
        raise BadRequest(f"sbatch printed no job id: {done}", key="launch.on", value="slurm")
    return words[1]


def _run_slurm(*command: str, script: str = "") -> str:
    """Run a command of SLURM and return its output. Raises `BadRequest` if it is missing or refuses."""
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        fix = "Run this where jobs are submitted, or write the script alone with --print."
        raise BadRequest(f"{command[0]} is not installed here", key="launch.on", value="slurm", fix=fix) from None
    except subprocess.TimeoutExpired:
        fact = f"{command[0]} did not answer within {TIMEOUT_S:g} s"
        raise BadRequest(fact, key="launch.on", value="slurm", fix="Ask for the state of the controller.") from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip().replace(f"{command[0]}: error: ", "")
        fix = "Change [launch.slurm], or write the script alone with --print and submit it yourself."
        raise BadRequest(f"{command[0]} refused: {message}", key="launch.on", value="slurm", fix=fix)
    return done.stdout.strip()


def time_until_down() -> float:
    """Return the seconds after which SLURM considers a host that does not answer as down (`SlurmdTimeout`)."""
    seconds = re.search(r"^SlurmdTimeout\s*=\s*(\d+) sec", _run_slurm("scontrol", "show", "config"), re.MULTILINE)
    return float(seconds[1]) if seconds else 0.0


def requeue_without_launcher(heartbeat: Path) -> None:
    """Queue this job again once its first host, which had the launcher, is down. Runs beside every node agent.

    With `--no-kill` SLURM keeps such a job, without anything in it. SLURM is only asked when the heartbeat is silent.
    """
    seen, since = b"", time.monotonic()
    while True:
        time.sleep(WATCH_INTERVAL_S)
        content = heartbeat.read_bytes() if heartbeat.exists() else b""
        if content != seen:
            seen, since = content, time.monotonic()
        elif time.monotonic() - since > SILENT_S and _first_host_is_down():
            requeue()
            return


def _first_host_is_down() -> bool:
    try:
        job = re.search(r"\bBatchHost=(\S+)", _run_slurm("scontrol", "--oneliner", "show", "job", os.environ[JOB_VAR]))
        state = _run_slurm("sinfo", "--noheader", f"--nodes={job[1]}", "--format=%T") if job else ""
    except BadRequest as error:  # the controller does not answer at the moment
        log.warning("%s", error)
        return False
    return state.startswith("down")


def requeue() -> None:
    """Queue this job again, which ends it. Raises `BadRequest` if SLURM refuses."""
    _run_slurm("scontrol", "requeue", os.environ[JOB_VAR])
