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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.orchestrator import OrchestratorConfig
    from headrace.config.run import RunConfig
    from headrace.config.sft import SftConfig

GRACE = 60.0
"""Seconds to end in order once the sweep that started this run is gone: its processes end one after the other."""


def run_from_files(kind: type[RunConfig] | type[SftConfig], command: str, arguments: argparse.Namespace) -> int:
    """From the command line to the exit code; SIGTERM ends it in order at any moment, and so does a sweep's end."""
    from headrace.launch import lifeline

    with leaving_on_sigterm():
        lifeline.watch(GRACE)
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
    from headrace.config.base import ConfigError, dump, load
    from headrace.config.run import RunConfig
    from headrace.launch.errors import naming_run
    from headrace.launch.local import check_ports, has_servers, launch, on_this_machine
    from headrace.launch.origin import resolve, resolve_again
    from headrace.launch.own_code import find_code_beside
    from headrace.launch.run_directory import decide, refuse_shorter
    from headrace.launch.saved_config import changes, pin
    from headrace.launch.variables import set_variables
    from headrace.text.tokenizer import Tokenizer
    from headrace.transport.run_dir import RunDir

    folders = find_code_beside(arguments.files)
    _refuse_other_kind(kind, arguments.files)
    config, notices = load(kind, arguments.files, arguments.overrides)
    _notify(*notices)
    if isinstance(config, RunConfig):
        _check_own_code(config.orchestrator)
    if arguments.dry_run:
        try:
            sentences = on_this_machine(config)
        except ConfigError as error:  # it may be meant for another machine
            sentences = [f"not on this machine: {error}"]
        print("".join(f"# {sentence}\n" for sentence in sentences) + dump(config), end="")
        return 0
    _notify(*set_variables(config.launch))
    if config.output_dir is None:
        raise ConfigError("output_dir: say where the run shall keep its files")
    _refuse_a_copy(arguments, config.output_dir)
    plan = decide(config.output_dir, arguments.resume, arguments.clean)
    if has_servers(config):
        check_ports(config.launch, config.inference)
    if plan.clean or (config.model.sft is not None and not plan.resume):
        _check_thoroughly(config)
    if plan.resume and plan.fork_of is None:
        refuse_shorter(plan.directory, config.max_steps)
    before = RunDir(plan.fork_of or plan.directory)
    model = resolve_again(config.model, before) if plan.resume else resolve(config.model)
    Tokenizer(model)  # refused here rather than by three processes
    config = pin(config, plan.directory, model)
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
    from headrace.config.run import RunConfig

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


def _check_own_code(config: OrchestratorConfig) -> None:
    """Code of the user's is there and takes its kwargs, before an older run is deleted for this."""
    from headrace.algorithms.registry import check_imports
    from headrace.algorithms.user_function import load_function
    from headrace.config.orchestrator import CustomFilterConfig
    from headrace.orchestrator import curricula

    for env in config.train.env:
        check_imports(config.algo_of(env))
        curricula.check_imports(config.curriculum_of(env))
    for entry in (*config.pre_batch_filters, *config.post_batch_filters):
        if isinstance(entry, CustomFilterConfig):
            load_function(entry.import_path, entry.kwargs, "filter")


def _check_thoroughly(config: RunConfig | SftConfig) -> None:
    """What may take a while, and is worth it where much would be lost or done in vain.

    Environments are constructed, and a loss of the user's, which brings torch, is found.
    """
    from headrace.algorithms.user_function import load_function
    from headrace.config.run import RunConfig
    from headrace.config.trainer import CustomLossConfig
    from headrace.environments.registry import load_environment

    for identifier, args in _environments_of(config):
        if identifier != "hackable":  # it may need the model's tokenizer, and its file was checked when it was read
            load_environment(identifier, args)
    if isinstance(config, RunConfig) and isinstance(loss := config.trainer.loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "loss")


def _environments_of(config: RunConfig | SftConfig) -> list[tuple[str, dict[str, Any]]]:
    """All that are trained on, learned from or evaluated in: id and args."""
    from headrace.config.run import RunConfig

    if isinstance(config, RunConfig):
        return [(env.id, env.args) for env in (*config.orchestrator.train.env, *config.orchestrator.eval.env)]
    sources = [source for source in (config.data, config.validation) if source is not None]
    learned = [(source.env, source.args) for source in sources if source.env is not None]
    return [*learned, *((env.id, env.args) for env in config.eval.env)]


def _end(number: int, frame: FrameType | None) -> None:
    """Until the run has a supervisor, and after: leave at once, but through every clean-up."""
    _notify(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def _notify(*notices: str) -> None:
    for notice in notices:
        print(f"headrace: {notice}", file=sys.stderr)
