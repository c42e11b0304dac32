"""`headrace sweep`: run many variants of a run file, evaluate their models, and report on them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from headrace.cli import eval as eval_command
from headrace.cli.common import add_format
from headrace.cli.training import exit_on_sigterm
from headrace.config.base import ConfigError
from headrace.errors import BadInput
from headrace.launch.errors import notify
from headrace.launch.own_code import add_code_folders
from headrace.launch.run_directory import hold
from headrace.launch.saved_config import kind_of
from headrace.launch.slurm_job import in_allocation, submitted
from headrace.observe.chart_export import check_format, convert_plots
from headrace.runfile.run import RunConfig
from headrace.tools.compare.view import align_table
from headrace.tools.sweep.config import SweepConfig, flatten, override_words, read_sweep
from headrace.tools.sweep.jobs import SCRIPT, Job, array_script, check_engines, default_directory, make_jobs
from headrace.tools.sweep.plan import PlannedRun, format_value, plan_runs
from headrace.tools.sweep.record import (
    SweepRecord,
    check_settings,
    name_runs,
    note_outcomes,
    read_record,
    revise_record,
    state_of,
    write_record,
)
from headrace.tools.sweep.report import write_report
from headrace.tools.sweep.results import EVALUATION
from headrace.tools.sweep.runner import LOGS, Runner, divide_machine
from headrace.transport.files import write_atomically

NOT_IN_FILE = ("checkpoints", "output", "zero_shot")
"""Options of `headrace eval` that a sweep sets itself, or does not support."""


def configure_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="the sweep's file, or several that are merged left to right; see docs/how-to/sweeps.md",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the runs and what each sets, and stop")
    how.add_argument("--report", action="store_true", help="only write the report, also while the sweep runs")
    how.add_argument("--clean", action="store_true", help="delete runs that were started with other settings")
    how.add_argument(
        "--print", action="store_true", help="with --launch.on slurm: write the batch script, submit nothing"
    )
    add_format(parser)
    parser.epilog = (
        "Any key of the file can be overridden: --parallel 2, --output_dir DIR. The same command continues a "
        "sweep that was stopped."
    )


@exit_on_sigterm()
def run_sweep(arguments: argparse.Namespace) -> int:
    """Read and check all runs, then start them. Nothing is changed before all checks passed."""
    check_format(arguments.format)
    sweep = read_sweep(arguments.files, arguments.overrides)
    files = sweep.files
    add_code_folders(files)
    kind, common = kind_of(files) or RunConfig, flatten(sweep.overrides)
    directory = sweep.output_dir or default_directory(common, kind, files, arguments.files)
    if arguments.report:
        record = read_record(directory)
        if not record.plan:
            raise BadInput("no sweep was started here", file=directory, fix="Leave out --report to start one.")
        note_outcomes(directory, record)
        _report(directory, record, sweep, arguments.format)
        return 0
    evaluation = None
    if sweep.eval is not None:
        evaluation = read_evaluation(sweep.eval, " + ".join(map(str, arguments.files)), directory)
    runs = name_runs(plan_runs(sweep), read_record(directory))
    jobs = make_jobs(runs, common, kind, files, directory)
    on_slurm = any(job.config.launch.on == "slurm" for job in jobs) and not in_allocation()
    at_once = sweep.parallel if on_slurm else len(divide_machine(sweep, jobs))
    if arguments.dry_run:
        print(f"{len(runs)} runs in {directory}, {at_once} at once\n{_plan_table(runs)}")
        return 0
    with hold(directory) as lock:
        previous = read_record(directory)
        record = revise_record(previous, runs, {job.name: job.config for job in jobs}, files)
        check_settings(directory, previous, record, clean=arguments.clean)
        if on_slurm:
            note_outcomes(directory, record)
            states = {run.name: state_of(run, directory) for run in record.planned}
            if left := [job for job in jobs if states[job.name] not in ("finished", "running")]:
                return _submit(sweep, record, directory, left, only_print=arguments.print)
        write_record(directory, record)
        code = Runner(sweep, record, directory, jobs, lock).run()
        try:
            finished = [str(directory / run.name) for run in record.planned if run.outcome == "finished"]
            if code == 0 and evaluation is not None and finished:
                evaluation.models = finished
                code = eval_command.run_eval(evaluation)
        finally:
            _report(directory, record, sweep, arguments.format)
    failed = [run.name for run in record.planned if run.outcome == "failed"]
    if failed and code == 0:
        notify(f"failed: {', '.join(failed)}; the same command tries again")
        return 1
    return code


def _submit(sweep: SweepConfig, record: SweepRecord, directory: Path, jobs: Sequence[Job], *, only_print: bool) -> int:
    """Submit a job array of the runs that are left."""
    check_engines(jobs, len(jobs) if sweep.parallel == "auto" else sweep.parallel)
    text = array_script(jobs, directory, sweep.parallel)
    with nullcontext() if only_print else submitted(text) as job:
        (directory / LOGS).mkdir(exist_ok=True)
        write_record(directory, record)
        write_atomically(directory / SCRIPT, text.encode())
    if job is None:
        print(f"wrote {directory / SCRIPT}; submit it with: sbatch {directory / SCRIPT}")
    else:
        print(f"submitted job {job} ({len(jobs)} runs): {directory / SCRIPT}\nlogs: {directory / LOGS}")
        print(f"cancel: scancel {job}\nreport on the runs that have ended: the same command with --report")
    return 0


def _plan_table(runs: Mapping[str, PlannedRun]) -> str:
    values = {name: run.overrides({}) for name, run in runs.items()}
    keys = list(dict.fromkeys(key for of_run in values.values() for key in of_run))
    rows = [
        [name, *(format_value(of_run[key]) if key in of_run else "" for key in keys)] for name, of_run in values.items()
    ]
    return align_table([["run", *keys], *rows])


def read_evaluation(table: Mapping[str, Any], file: str, directory: Path) -> argparse.Namespace:
    """Parse the table `eval` as arguments of `headrace eval`; `models` are set later."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message, file=file, key="eval")

    for key in table:
        if key in NOT_IN_FILE:
            fact = "the final models are evaluated, into the sweep's directory"
            raise ConfigError(fact, file=file, key=f"eval.{key}")
    parser = Parser(allow_abbrev=False, add_help=False)
    eval_command.configure_eval(parser)
    words = [word for key, value in table.items() for word in _option(key, value)]
    arguments = parser.parse_args(["models", *words, "--output", str(directory / EVALUATION)])
    eval_command.read_evaluation(arguments)
    return arguments


def _option(key: str, value: Any) -> list[str]:
    """Return `--num-examples 200`; a table becomes KEY=VALUE words."""
    name = f"--{key.replace('_', '-')}"
    if isinstance(value, dict):
        return [name, *(word.removeprefix("--") for word in override_words(value))]
    return [name, *map(str, value if isinstance(value, list) else [value])]


def _report(directory: Path, record: SweepRecord, sweep: SweepConfig, format: str) -> None:
    report = write_report(directory, record, sweep.metrics)
    page, *others = [*report.files, *convert_plots(report.files, format)]
    print(f"{report.text}\n\nwrote {page}, {', '.join(path.name for path in others)}")
