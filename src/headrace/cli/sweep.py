"""`headrace sweep`: many runs over a grid, a list or random values of any keys, with seeds, and a report of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.cli.arguments import add_format

if TYPE_CHECKING:
    from headrace.tools.sweep.file import SweepConfig
    from headrace.tools.sweep.plan import Planned
    from headrace.tools.sweep.record import SweepRecord

NOT_IN_FILE = ("checkpoints", "output", "zero_shot")
"""Options of `headrace eval` that a sweep sets itself, or has no use for."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="the sweep's file, or several that are merged left to right; docs/how-to/sweeps.md says what is in them",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the runs and what each sets, and stop")
    how.add_argument("--report", action="store_true", help="only write the report of what is there, also while it runs")
    how.add_argument("--clean", action="store_true", help="delete runs that were started with other settings")
    add_format(parser)
    parser.epilog = (
        "Any key of the file can be set on top of it: --parallel 2, --output_dir DIR. What is done is kept: the same "
        "command goes on where it was stopped."
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.cli.training import leaving_on_sigterm

    with leaving_on_sigterm():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Read, check all runs, then start them. Nothing is changed before all checks passed."""
    from headrace.cli.config import kind_of
    from headrace.launch.own_code import add_code_folders
    from headrace.launch.run_directory import hold
    from headrace.observe.chart_export import check_format
    from headrace.runfile.run import RunConfig
    from headrace.tools.sweep.file import flat, read_sweep
    from headrace.tools.sweep.jobs import default_directory, jobs_of
    from headrace.tools.sweep.launch import run_jobs, shares_of
    from headrace.tools.sweep.plan import planned
    from headrace.tools.sweep.record import check_settings, named, read_record, revised, write_record

    check_format(arguments.format)
    sweep = read_sweep(arguments.files, arguments.overrides)
    written = " + ".join(map(str, arguments.files))
    files = sweep.files
    add_code_folders(files)
    kind, common = kind_of(files) or RunConfig, flat(sweep.overrides)
    directory = sweep.output_dir or default_directory(common, kind, files, arguments.files)
    if arguments.report:
        return _report_again(directory, sweep, arguments.format)
    evaluation = None if sweep.eval is None else read_evaluation(sweep.eval, written, directory)
    runs = named(planned(sweep), read_record(directory))
    jobs = jobs_of(runs, common, kind, files, directory)
    at_once = len(shares_of(sweep, jobs))
    if arguments.dry_run:
        _print_plan(runs, directory, at_once)
        return 0
    with hold(directory) as held:
        known = read_record(directory)
        record = revised(known, runs, {job.name: job.config for job in jobs}, files)
        check_settings(directory, known, record, clean=arguments.clean)
        write_record(directory, record)
        code = run_jobs(sweep, record, directory, jobs, held)
        try:
            if code == 0 and evaluation is not None:
                code = _evaluate(record, directory, evaluation)
        finally:
            _report(directory, record, sweep, arguments.format)
    failed = [run.name for run in record.asked if run.outcome == "failed"]
    if failed and code == 0:
        print(f"headrace: failed: {', '.join(failed)}; the same command tries again", file=sys.stderr)
        return 1
    return code


def _print_plan(runs: Mapping[str, Planned], directory: Path, at_once: int) -> None:
    from headrace.tools.compare.view import align
    from headrace.tools.sweep.names import shown

    keys = list(dict.fromkeys(key for run in runs.values() for key in run.overrides({})))
    cells = [["run", *keys]]
    for name, run in runs.items():
        values = run.overrides({})
        cells.append([name, *(shown(values[key]) if key in values else "" for key in keys)])
    print(f"{len(runs)} runs in {directory}, {at_once} at once\n{align(cells)}")


def read_evaluation(table: Mapping[str, Any], file: str, directory: Path) -> argparse.Namespace:
    """The table `eval` as the arguments of `headrace eval`, without its models; refused as there."""
    from headrace.cli import eval as command
    from headrace.config.base import ConfigError
    from headrace.tools.sweep.results import EVALUATION

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{file}: eval: {message}")

    for key in table:
        if key in NOT_IN_FILE:
            raise ConfigError(f"{file}: eval.{key}: the final models are evaluated, into the sweep's folder")
    parser = Parser(allow_abbrev=False, add_help=False)
    command.configure(parser)
    options = [word for key, value in table.items() for word in _option(key, value)]
    arguments = parser.parse_args(["models", *options, "--output", str(directory / EVALUATION)])
    command.read_evaluation(arguments)
    return arguments


def _option(key: str, value: Any) -> list[str]:
    """`--num-examples 200`; a table as KEY=VALUE."""
    from headrace.tools.sweep.words import words

    name = f"--{key.replace('_', '-')}"
    if isinstance(value, dict):
        return [name, *(word.removeprefix("--") for word in words(value))]
    return [name, *map(str, value if isinstance(value, list) else [value])]


def _evaluate(record: SweepRecord, directory: Path, arguments: argparse.Namespace) -> int:
    """The final models of the runs that are finished."""
    from headrace.cli import eval as command

    finished = [str(directory / run.name) for run in record.asked if run.outcome == "finished"]
    if not finished:
        return 0
    return command.run(argparse.Namespace(**{**vars(arguments), "models": finished}))


def _report_again(directory: Path, sweep: SweepConfig, format: str) -> int:
    from headrace.errors import BadInput
    from headrace.tools.sweep.record import read_record

    record = read_record(directory)
    if not record.plan:
        raise BadInput(f"{directory} has no sweep: start one by leaving --report out")
    _report(directory, record, sweep, format)
    return 0


def _report(directory: Path, record: SweepRecord, sweep: SweepConfig, format: str) -> None:
    from headrace.observe.chart_export import convert_plots
    from headrace.tools.sweep.report import write_report

    report = write_report(directory, record, sweep.metrics)
    page, *others = [*report.files, *convert_plots(report.files, format)]
    print(f"{report.text}\n\nwrote {page}, {', '.join(path.name for path in others)}")
