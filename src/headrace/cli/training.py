"""`headrace rl`, `sft`, `dpo` and `demo`: from files on the command line to a launched run."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType

from headrace.cli.common import add_run_arguments, add_start_options
from headrace.cli.new import DEMO, examples_directory
from headrace.cli.prepare import Kind, PreparedRun, prepare
from headrace.config.dpo import DpoConfig
from headrace.config.sft import SftConfig
from headrace.errors import SAVED
from headrace.launch.errors import naming_run, notify
from headrace.launch.process import stop_with_launcher
from headrace.launch.slurm_job import (
    REQUEUE_VAR,
    SCRIPT,
    JobSize,
    in_allocation,
    log_of,
    requeue,
    run_script,
    submitted,
)
from headrace.runfile.run import RunConfig
from headrace.transport.files import write_atomically

STOP_TIMEOUT_S = 60.0
"""Time to stop after the sweep that started this run has ended: the run's processes stop one after the other."""


def configure_rl(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--trainer.optim.lr 1e-5")
    _add_print(parser)


def configure_sft(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--optim.lr 1e-5")
    _add_print(parser)


configure_dpo = configure_sft


def configure_demo(parser: argparse.ArgumentParser) -> None:
    add_start_options(parser, "--max_steps 20")
    _add_print(parser)
    parser.set_defaults(files=[examples_directory() / DEMO])


def _add_print(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--print", action="store_true", help="with launch.on slurm: write the batch script, submit nothing"
    )


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, and SIGUSR1 before there is anything to save, into `SystemExit`, so that every clean-up runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        notify(f"stopped by {signal.Signals(number).name}")
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@exit_on_sigterm()
def _run(kind: Kind, arguments: argparse.Namespace) -> int:
    """Run and return the exit code; SIGTERM, or the end of a sweep that started this, stops the run in order.

    A batch job of SLURM is queued again at its time limit, also if nothing has started until then.
    """
    try:
        stop_with_launcher(STOP_TIMEOUT_S)
        code = _prepare_and_run(kind, arguments)
    except SystemExit as stop:
        if stop.code != SAVED:
            raise
        code = SAVED
    if code == SAVED and REQUEUE_VAR in os.environ:
        notify("asking SLURM to queue this job again, which continues the run")
        requeue()
    return code


run_rl = run_demo = partial(_run, RunConfig)
run_sft, run_dpo = partial(_run, SftConfig), partial(_run, DpoConfig)


def _prepare_and_run(kind: Kind, arguments: argparse.Namespace) -> int:
    prepared = prepare(kind, arguments)
    if prepared is None:
        return 0
    if prepared.config.launch.on == "slurm" and not in_allocation():
        return _submit(prepared, only_print=arguments.print)
    from headrace.launch.run import launch

    planned = prepared.planned
    with naming_run(prepared.run.root):
        prepared.plan.apply()
        return launch(
            prepared.config,
            prepared.run,
            prepared.code_folders,
            resume=prepared.plan.resume,
            again=prepared.again,
            max_running=None if planned is None else planned.max_running,
            memory_advice=None if planned is None else planned.memory_advice,
        )


def _submit(prepared: PreparedRun, *, only_print: bool) -> int:
    """Write the run directory and submit a batch job that runs it; with `only_print` only write the script."""
    from headrace.launch.processes import needs_of

    run, launch = prepared.run, prepared.config.launch
    size = JobSize(needs_of(prepared.config).nodes, launch.gpus_per_node)
    text, script = run_script(run, prepared.config.COMMAND, launch.slurm, size), run.root / SCRIPT
    with nullcontext() if only_print else submitted(text) as job:
        prepared.write()
        run.logs.mkdir(parents=True, exist_ok=True)  # SLURM makes no folders
        write_atomically(script, text.encode())
    if job is None:
        print(f"wrote {script}; submit it with: sbatch {script}")
    else:
        print(f"submitted job {job} ({size.nodes} hosts): {script}\nlog: {log_of(run)}\ncancel: scancel {job}")
    return 0
