"""`headrace rl` and `headrace sft`: from files on the command line to a launched run."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from headrace.cli.common import add_run_arguments
from headrace.cli.config import kind_of
from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.launch.errors import BadRequest, naming_run
from headrace.launch.own_code import add_code_folders, save_folders
from headrace.launch.process import set_variables, stop_with_launcher
from headrace.launch.run_directory import DirectoryPlan, hold, is_run, plan_directory, refuse_shorter
from headrace.launch.saved_config import changes, pin, save
from headrace.launch.slurm_job import JobSize, in_allocation, log_of, run_script, submitted, write_script
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

Kind = type[RunConfig] | type[SftConfig]
STOP_TIMEOUT_S = 60.0
"""Time to stop after the sweep that started this run has ended: the run's processes stop one after the other."""


def configure_rl(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--trainer.optim.lr 1e-5")


def configure_sft(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--optim.lr 1e-5")


def run_rl(arguments: argparse.Namespace) -> int:
    return _run(RunConfig, arguments)


def run_sft(arguments: argparse.Namespace) -> int:
    return _run(SftConfig, arguments)


def _run(kind: Kind, arguments: argparse.Namespace) -> int:
    """Run to the exit code; SIGTERM, or the end of a sweep that started this, stops the run in order."""
    with exit_on_sigterm():
        stop_with_launcher(STOP_TIMEOUT_S)
        return _launch(kind, arguments)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that every clean-up runs."""
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: FrameType | None) -> None:
    _notify(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def _launch(kind: Kind, arguments: argparse.Namespace) -> int:
    """Load, check, find the model, prepare the run directory, launch. Nothing is changed before all checks passed."""
    from headrace.text import import_renderers

    import_renderers()
    from headrace.algorithms.user_function import load_function
    from headrace.launch.checks import check_run
    from headrace.launch.origin import model_of_run, resolve, resolve_again
    from headrace.launch.resources import plan_here
    from headrace.launch.run import launch, on_this_machine
    from headrace.trainer.losses.custom import CustomLossConfig

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
            planned = None if checked.shape is None else plan_here(config, checked.shape)
            sentences = [*on_this_machine(config), *checked.lines, *(planned.lines if planned else ())]
            if planned is not None and planned.refusal is not None:
                sentences.append(f"not on this machine: {planned.refusal}")
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
    submits = config.launch.on == "slurm" and not in_allocation()
    planned = None if checked.shape is None or submits else plan_here(config, checked.shape)
    if planned is not None and planned.refusal is not None:
        raise planned.refusal
    _notify(*checked.lines, *(planned.lines if planned else ()))
    if plan.notice:
        _notify(plan.notice)
    if plan.resume and (changed := changes(config, before)):
        _notify("the configuration differs from the saved one: " + "; ".join(changed))
    words = [arguments.command, *map(str, arguments.files), *arguments.overrides]
    if plan.fork_of is not None:
        words = [word for word in words if not word.startswith("--output_dir=")]
        if "--output_dir" in words:
            place = words.index("--output_dir")
            del words[place : place + 2]
        words += ["--output_dir", str(plan.directory)]
    again = shlex.join(["headrace", *words, "--resume"])
    if submits:
        return _submit(arguments, config, plan, folders)
    with naming_run(plan.directory):
        plan.apply()
        return launch(
            config,
            RunDir(plan.directory),
            folders,
            resume=plan.resume,
            again=again,
            max_running=None if planned is None else planned.max_running,
            memory_advice=None if planned is None else planned.memory_advice,
        )


def _submit(
    arguments: argparse.Namespace, config: RunConfig | SftConfig, plan: DirectoryPlan, folders: Sequence[str]
) -> int:
    """Prepare the run directory and submit a batch job that runs it; with `--print` only write the script."""
    from headrace.launch.processes import needs_of

    run, launch = RunDir(plan.directory), config.launch
    size = JobSize(needs_of(config).nodes, launch.gpus_per_node)
    text = run_script(run, arguments.command, launch.slurm, size)
    with nullcontext() if arguments.print else submitted(text) as job, naming_run(run.root):
        plan.apply()
        with hold(run.root):
            save(config, run)
            save_folders(folders, run)
            script = write_script(run, text)
    if job is None:
        print(f"wrote {script}; submit it with: sbatch {script}")
    else:
        print(f"submitted job {job} ({size.nodes} hosts): {script}\nlog: {log_of(run)}\ncancel: scancel {job}")
    return 0


def _refuse_other_kind(kind: Kind, files: Sequence[Path]) -> None:
    """Raise `ConfigError` for a run file of `sft` given to `rl`, and the reverse, instead of one error per key."""
    other = kind_of(files)
    if other is not None and other is not kind:
        command = "rl" if other is RunConfig else "sft"
        fix = shlex.join(["headrace", command, *map(str, files)])
        raise ConfigError(f"a run file of headrace {command}", file=files[0], fix=f"Write: {fix}")


def _plan(arguments: argparse.Namespace, config: RunConfig | SftConfig) -> DirectoryPlan:
    """Return what will be done with `output_dir`; raises if it cannot be done."""
    from headrace.launch.processes import has_servers
    from headrace.launch.run import check_ports

    if config.output_dir is None:
        raise ConfigError("not set", key="output_dir", fix="Say where the run keeps its files.")
    _refuse_a_copy(arguments, config.output_dir)
    plan = plan_directory(config.output_dir, arguments.resume, arguments.clean)
    if plan.resume and plan.fork_of is None:
        refuse_shorter(plan.directory, config.max_steps)
    if has_servers(config) and config.launch.on == "local":
        check_ports(config)
    return plan


def _refuse_a_copy(arguments: argparse.Namespace, output_dir: Path) -> None:
    """Raise `BadRequest` if the run file is that of a copied or moved run, which names the old directory."""
    if any(word.partition("=")[0] == "--output_dir" for word in arguments.overrides):
        return
    for file in arguments.files:
        folder = Path(file).parent
        if Path(file) == RunDir(folder).config and is_run(folder) and folder.resolve() != output_dir.resolve():
            raise BadRequest(
                "the run file is in another directory, that of a copied or moved run",
                file=file,
                key="output_dir",
                value=str(output_dir),
                fix=f"Choose one: --output_dir {folder}, or --output_dir {output_dir}.",
            )


def _notify(*notices: str) -> None:
    for notice in notices:
        print(f"headrace: {notice}", file=sys.stderr)
