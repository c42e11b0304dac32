"""`headrace prepare`: check a run, resolve its model and data, and write its directory; start nothing.

`headrace rl`, `headrace sft` and `headrace dpo` begin with the same steps.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import add_run_arguments
from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.launch import set_variables
from headrace.launch.errors import BadRequest, naming_run, notify
from headrace.launch.hosts.ray_cluster import check_installed
from headrace.launch.own_code import add_code_folders, save_folders
from headrace.launch.run_directory import DirectoryPlan, hold, is_run, plan_directory, refuse_shorter
from headrace.launch.saved_config import changes, kind_of, pin, save
from headrace.launch.slurm_job import in_allocation
from headrace.runfile.reading import load
from headrace.runfile.run import AnyRun, RunConfig
from headrace.transport.run_dir import RunDir

if TYPE_CHECKING:  # imported later, after the renderers
    from headrace.launch.checks import Subject
    from headrace.launch.resources import PlannedRun

Kind = type[AnyRun]


@dataclass(frozen=True)
class PreparedRun:
    """A run that passed all checks and whose model exists. Its directory is not changed yet."""

    config: AnyRun
    plan: DirectoryPlan
    code_folders: Sequence[str]
    again: str
    """The command that continues the run."""
    planned: PlannedRun | None
    """None if the model's sizes are not known, or the run is not for this machine."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.plan.directory)

    def write(self) -> None:
        """Write the run directory, from which `headrace rl|sft|dpo RUN/config.toml --resume` starts the run."""
        with naming_run(self.run.root):
            self.plan.apply()
            with hold(self.run.root):
                save(self.config, self.run)
                save_folders(self.code_folders, self.run)


def configure_prepare(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--trainer.optim.lr 1e-5")


def run_prepare(arguments: argparse.Namespace) -> int:
    prepared = prepare(kind_of(arguments.files) or RunConfig, arguments)
    if prepared is not None:
        prepared.write()
        run = prepared.run
        command = shlex.join(["headrace", prepared.config.COMMAND, str(run.config), "--resume"])
        print(f"prepared {run.root}; start it, and continue it later, with: {command}")
    return 0


def prepare(kind: Kind, arguments: argparse.Namespace) -> PreparedRun | None:
    """Return a run that is checked and planned; None after a dry run, which prints both. Changes no run directory."""
    from headrace.text import import_renderers

    import_renderers()
    from headrace.imports import load_function
    from headrace.launch.checks import check_run
    from headrace.launch.origin import model_of_run, resolve
    from headrace.launch.resources import plan_here
    from headrace.trainer.losses.custom import CustomLossConfig

    folders = add_code_folders(arguments.files)
    _refuse_other_kind(kind, arguments.files)
    config, notices = load(kind, arguments.files, arguments.overrides)
    notify(*notices, *set_variables(config.launch))
    if config.launch.on == "ray":
        check_installed()
    plan = None if arguments.dry_run and arguments.resume is None else _plan(arguments, config)
    goes_on = plan is not None and plan.resume and (config.model.sft or config.model.init)
    before = RunDir(plan.fork_of or plan.directory) if plan is not None else None
    began_with = model_of_run(before) if goes_on and before is not None else None
    checked = check_run(config, began_with, downloads=not arguments.dry_run)
    notify(*checked.notices)
    if arguments.dry_run or plan is None or before is None:
        sentences = _dry_run(config, checked)
        print("".join(f"# {sentence}\n" for sentence in sentences) + dump(config), end="")
        return None
    if plan.clean and isinstance(config, RunConfig) and isinstance(loss := config.trainer.loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "loss")  # brings torch: worth it where a run is deleted
    if began_with is not None:  # even if the data behind `model.sft` has changed since
        notify(f"continuing with the initial model of this run, {began_with}; for another model, start a new run")
    config = pin(config, plan.directory, began_with or resolve(config.model))
    if checked.model is None:  # it has been fetched by now
        checked = check_run(config)
        notify(*checked.notices)
    is_local = config.launch.on == "local"
    planned = plan_here(config, checked.shape) if checked.shape is not None and is_local else None
    if planned is not None and planned.refusal is not None:
        raise planned.refusal
    notify(*checked.lines, *(planned.lines if planned else ()))
    if plan.notice:
        notify(plan.notice)
    if plan.resume and (changed := changes(config, before)):
        notify("the configuration differs from the saved one: " + "; ".join(changed))
    return PreparedRun(config, plan, folders, _command_to_continue(kind, arguments, plan), planned)


def _dry_run(config: AnyRun, checked: Subject) -> list[str]:
    """Return what the checks found, where the processes would run, and what they need of this machine."""
    from headrace.launch.processes import describe_placement, on_this_machine
    from headrace.launch.resources import plan_here

    is_local = config.launch.on == "local"
    where = "this machine" if is_local else "the expected hosts"
    try:
        table = describe_placement(config)
        if not is_local:
            return [*checked.lines, *table]
        planned = None if checked.shape is None else plan_here(config, checked.shape)
        sentences = [*on_this_machine(config), *checked.lines, *(planned.lines if planned else ()), *table]
        if planned is not None and planned.refusal is not None:
            sentences.append(f"not on {where}: {planned.refusal}")
    except ConfigError as error:  # it may be meant for another machine
        sentences = [f"not on {where}: {error}", *checked.lines]
    return sentences


def _command_to_continue(kind: Kind, arguments: argparse.Namespace, plan: DirectoryPlan) -> str:
    words = [kind.COMMAND, *map(str, arguments.files), *arguments.overrides]
    if plan.fork_of is not None:
        words = [word for word in words if not word.startswith("--output_dir=")]
        if "--output_dir" in words:
            place = words.index("--output_dir")
            del words[place : place + 2]
        words += ["--output_dir", str(plan.directory)]
    return shlex.join(["headrace", *words, "--resume"])


def _refuse_other_kind(kind: Kind, files: Sequence[Path]) -> None:
    """Raise `ConfigError` for a run file of another command, instead of one error per key."""
    other = kind_of(files)
    if other is not None and other is not kind:
        fix = shlex.join(["headrace", other.COMMAND, *map(str, files)])
        raise ConfigError(f"a run file of headrace {other.COMMAND}", file=files[0], fix=f"Write: {fix}")


def _plan(arguments: argparse.Namespace, config: AnyRun) -> DirectoryPlan:
    """Return what will be done with `output_dir`; raises if it cannot be done."""
    from headrace.launch.placement import place
    from headrace.launch.processes import expected_hosts, has_servers, needs_of
    from headrace.launch.run import check_ports

    if config.output_dir is None:
        raise ConfigError("not set", key="output_dir", fix="Set the directory of the run: --output_dir outputs/NAME.")
    _refuse_a_copy(arguments, config.output_dir)
    plan = plan_directory(config.output_dir, arguments.resume, arguments.clean)
    if plan.resume and plan.fork_of is None:
        refuse_shorter(plan.directory, config.max_steps)
    if has_servers(config) and config.launch.on == "local":
        check_ports(config)
    if config.launch.on == "slurm" and not in_allocation() and config.launch.gpus_per_node is not None:
        place(expected_hosts(config), needs_of(config))  # before it waits in a queue
    return plan


def _refuse_a_copy(arguments: argparse.Namespace, output_dir: Path) -> None:
    """Raise `BadRequest` if the run file is that of a copied or moved run, which names the old directory."""
    if any(word.partition("=")[0] == "--output_dir" for word in arguments.overrides):
        return
    for file in arguments.files:
        folder = Path(file).parent
        if Path(file) == RunDir(folder).config and is_run(folder) and folder.resolve() != output_dir.resolve():
            fact = "the run file is in another directory, that of a copied or moved run"
            fix = f"Choose one: --output_dir {folder}, or --output_dir {output_dir}."
            raise BadRequest(fact, file=file, key="output_dir", value=str(output_dir), fix=fix)
