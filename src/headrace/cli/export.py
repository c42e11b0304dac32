"""`headrace export`: write a checkpoint as a Hugging Face model."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN|CHECKPOINT", type=Path, help="a run directory, or one of its checkpoints"
    )
    parser.add_argument("target", metavar="DIR", type=Path, help="where to write the model")
    parser.add_argument("--step", type=int, help="which checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="what the tensors shall be (default: what the model was in before it was trained)",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, in PEFT's format, of a run that trained one"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")


def run(arguments: argparse.Namespace) -> int:
    from headrace.launch.errors import BadRequest

    target: Path = arguments.target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadRequest("exists and is not an empty directory", key="DIR", value=target, fix="Give another.")
    checkpoint = find(arguments.source, arguments.step)
    from headrace.trainer.export import export

    export(
        checkpoint,
        target,
        arguments.dtype,
        adapter_only=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(f"wrote {target}, the model of {checkpoint}")
    return 0


def find(source: Path, step: int | None) -> Path:
    """The checkpoint that is meant; what there is instead, where there is none."""
    from headrace.launch.errors import BadRequest
    from headrace.launch.run_directory import checkpoints
    from headrace.transport.files import MARKER

    if (source / MARKER).is_file() and step is None:
        return source
    found = checkpoints(source)
    if not found:
        raise BadRequest("neither a complete checkpoint nor a run that has one", key="RUN|CHECKPOINT", value=source)
    if step is not None and step not in found:
        known = ", ".join(map(str, found))
        raise BadRequest(f"{source} has no complete checkpoint of it (it has: {known})", key="--step", value=step)
    return found[max(found) if step is None else step]
