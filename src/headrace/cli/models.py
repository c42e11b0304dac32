"""`headrace models`, `headrace export` and `headrace init-model`: which models work, and writing their directories."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.common import refuse_occupied
from headrace.launch.errors import BadRequest
from headrace.launch.run_directory import checkpoints
from headrace.rollout.schema import DamagedFile
from headrace.transport.files import MARKER


def configure_models(parser: argparse.ArgumentParser) -> None:
    pass


def run_models(arguments: argparse.Namespace) -> int:
    from headrace.tools.models import table

    print(table(), end="")
    return 0


def configure_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="RUN|CHECKPOINT", type=Path, help="a run directory, or one of its checkpoints")
    add("target", metavar="DIR", type=Path, help="where to write the model")
    add("--step", type=int, help="which checkpoint of the run (default: the newest)")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="the type of the tensors (default: that of the model before training)",
    )
    add("--adapter", action="store_true", help="only the LoRA adapter of the run, in PEFT's format")
    add("--trust-remote-code", action="store_true", help="run the model's own code")


def run_export(arguments: argparse.Namespace) -> int:
    refuse_occupied(arguments.target)
    checkpoint = _find_checkpoint(arguments.source, arguments.step)
    from headrace.trainer.learner import export

    try:
        export(
            checkpoint,
            arguments.target,
            arguments.dtype,
            adapter_only=arguments.adapter,
            trust_remote_code=arguments.trust_remote_code,
        )
    except DamagedFile as damage:
        others = [str(step) for step, path in checkpoints(arguments.source).items() if path != checkpoint]
        damage.fix = f"Export another one with --step: {', '.join(others)}." if others else "Restore it from a copy."
        raise
    print(f"wrote {arguments.target}, the model of {checkpoint}")
    return 0


def _find_checkpoint(source: Path, step: int | None) -> Path:
    """Return a checkpoint of a run, or the source itself; raises `BadRequest` with the steps that there are."""
    if (source / MARKER).is_file() and step is None:
        return source
    by_step = checkpoints(source)
    if not by_step:
        raise BadRequest("neither a complete checkpoint nor a run that has one", key="RUN|CHECKPOINT", value=source)
    if step is not None and step not in by_step:
        steps = ", ".join(map(str, by_step))
        raise BadRequest(f"{source} has no complete checkpoint of it (it has: {steps})", key="--step", value=step)
    return by_step[max(by_step) if step is None else step]


def configure_init_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", choices=["tiny"], help="tiny: about a million parameters, Qwen3 architecture, bytes")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0)


def run_init_model(arguments: argparse.Namespace) -> int:
    refuse_occupied(arguments.directory)
    from headrace.trainer.tiny import write_tiny_model

    write_tiny_model(arguments.directory, arguments.seed)
    print(f"wrote {arguments.directory}")
    return 0
