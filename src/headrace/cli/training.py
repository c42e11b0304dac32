"""How `rl` and `sft` go from files on the command line to a launched run."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config.sft import SftConfig
    from headrace.launch.run_directory import DirectoryPlan
    from headrace.runfile.run import RunConfig

GRACE_S = 60.0
"""Seconds to end in order once the sweep that started this run is gone: its processes end one after the other."""


def run_from_files(kind: type[RunConfig] | type[SftConfig], command: str, arguments: argparse.Namespace) -> int:
    """From the command line to the exit code; SIGTERM ends it in order at any moment, and so does a sweep's end."""
    from headrace.launch.process import stop_with_launcher

    with leaving_on_sigterm():
        stop_with_launcher(GRACE_S)
        return _run(kind, command, arguments)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM leaves through every clean-up."""
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(kind: type[RunConfig] | type[SftConfig], command: str, arguments: argparse.Namespace) -> int:
    """Load, check, find the model, prepare the run directory, launch. Nothing is changed before all checks passed."""
    from headrace.text import import_renderers

    import_renderers()
    from headrace.algorithms.user_function import load_function
    from headrace.config.base import ConfigError
    from headrace.config.files import dump
    from headrace.launch.checks import check_run
    from headrace.launch.errors import naming_run
    from headrace.launch.local import launch, on_this_machine
    from headrace.launch.origin import model_of_run, resolve, resolve_again
    from headrace.launch.own_code import add_code_folders
    from headrace.launch.process import set_variables
    from headrace.launch.saved_config import changes, pin
    from headrace.runfile.reading import load
    from headrace.runfile.run import RunConfig
    from headrace.trainer.losses.custom import CustomLossConfig
    from headrace.transport.run_dir import RunDir

    folders = add_code_folders(arguments.files)
    _refuse_other_kind(kind, arguments.files)
    config, notices = load(kind, arguments.files, arguments.overrides)
    _notify(*notices, *set_variables(config.launch))
    plan = None if arguments.dry_run and arguments.resume is None else _plan(arguments, config)
    goes_on = plan is not None and plan.resume and (config.model.sft or config.model.init)
    before = RunDir(plan.fork_of or plan.directory) if plan is not None else None
    began_with = model_of_run(before) if goes_on and before is not None else None
    checked = check_run(config, began_with, downloads=not arguments.dry_run)
    _notify(*checked.notices)
    if arguments.dry_run or plan is None or before is None:
        try:
            sentences = [*on_this_machine(config), *checked.lines]
        except ConfigError as error:  # it may be meant for another machine
            sentences = [f"not on this machine: {error}", *checked.lines]
        print("".join(f"# {sentence}\n" for sentence in sentences) + dump(config), end="")
        return 0
    if plan.clean and isinstance(config, RunConfig) and isinstance(loss := config.trainer.loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "loss")  # brings torch: worth it where a run is deleted
    model = resolve_again(config.model, before) if plan.resume else resolve(config.model)
    config = pin(config, plan.directory, model)
    if checked.model is None:  # it has been fetched by now
        checked = check_run(config)
        _notify(*checked.notices)
    _notify(*checked.lines)
    if plan.notice:
        _notify(plan.notice)
    if plan.resume and (changed := changes(config, before)):
        _notify("the configuration differs from the saved one: " + "; ".join(changed))
    words = [command, *map(str, arguments.files), *arguments.overrides]
    if plan.fork_of is not None:
        words = [*_without_output_dir(words), "--output_dir", str(plan.directory)]
    again = shlex.join(["headrace", *words, "--resume"])
    with naming_run(plan.directory):
        plan.apply()
        return launch(config, RunDir(plan.directory), folders, resume=plan.resume, again=again)


def _refuse_other_kind(kind: type[RunConfig] | type[SftConfig], files: Sequence[Path]) -> None:
    """Refuse a run file of supervised training for `rl`, and the reverse, rather than its keys one by one."""
    from headrace.cli.config import kind_of
    from headrace.config.base import ConfigError
    from headrace.runfile.run import RunConfig

    other = kind_of(files)
    if other is not None and other is not kind:
        command = "rl" if other is RunConfig else "sft"
        fix = shlex.join(["headrace", command, *map(str, files)])
        raise ConfigError(f"a run file of headrace {command}", file=files[0], fix=f"Write: {fix}")


def _without_output_dir(words: Sequence[str]) -> list[str]:
    """Drop an override of the directory, which may be written in two ways."""
    kept = [word for word in words if not word.startswith("--output_dir=")]
    if "--output_dir" in kept:
        place = kept.index("--output_dir")
        del kept[place : place + 2]
    return kept


def _plan(arguments: argparse.Namespace, config: RunConfig | SftConfig) -> DirectoryPlan:
    """What is to be done with `output_dir`, and that it can be done."""
    from headrace.config.base import ConfigError
    from headrace.launch.local import check_ports, has_servers
    from headrace.launch.run_directory import plan_directory, refuse_shorter

    if config.output_dir is None:
        raise ConfigError("not set", key="output_dir", fix="Say where the run keeps its files.")
    _refuse_a_copy(arguments, config.output_dir)
    plan = plan_directory(config.output_dir, arguments.resume, arguments.clean)
    if plan.resume and plan.fork_of is None:
        refuse_shorter(plan.directory, config.max_steps)
    if has_servers(config):
        check_ports(config.launch, config.inference)
    return plan


def _refuse_a_copy(arguments: argparse.Namespace, output_dir: Path) -> None:
    """A run that was copied or moved has a configuration which still names its old place."""
    from headrace.launch.errors import BadRequest
    from headrace.launch.run_directory import is_run
    from headrace.transport.run_dir import RunDir

    if any(word.partition("=")[0] == "--output_dir" for word in arguments.overrides):
        return
    for file in arguments.files:
        folder = Path(file).parent
        if Path(file) == RunDir(folder).config and is_run(folder) and folder.resolve() != output_dir.resolve():
            raise BadRequest(
                f"{file} is of a run in {output_dir}, and lies in {folder}: was that copied or moved? "
                f"Say which is meant: --output_dir {folder}, or --output_dir {output_dir}"
            )


def _end(number: int, frame: FrameType | None) -> None:
    """Until the run has a supervisor, and after: leave at once, but through every clean-up."""
    _notify(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def _notify(*notices: str) -> None:
    for notice in notices:
        print(f"headrace: {notice}", file=sys.stderr)
