"""`headrace init-model`: write a new model with random weights."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", choices=["tiny"], help="tiny: about a million parameters, Qwen3 architecture, bytes")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    from headrace.launch.errors import BadRequest

    directory: Path = arguments.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadRequest(f"{directory} exists and is not an empty directory")
    from headrace.trainer.tiny import write_tiny_model

    write_tiny_model(directory, arguments.seed)
    print(f"wrote {directory}")
    return 0
