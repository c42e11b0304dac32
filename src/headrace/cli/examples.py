"""`headrace examples` and `headrace demo`: the run files that Headrace comes with."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import headrace
from headrace.cli.common import RUN_FILES, refuse_occupied

DEMO = "reverse-text/rl.toml"


def examples_directory() -> Path:
    """Return `headrace/examples` of an installed wheel, or `examples` of the checkout that is imported."""
    package = Path(headrace.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parents[1] / "examples"


def configure_examples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--copy",
        metavar="DIR",
        nargs="?",
        type=Path,
        const=Path("examples"),
        help="copy all of them to DIR [./examples] instead of listing them",
    )


def run_examples(arguments: argparse.Namespace) -> int:
    source = examples_directory()
    if arguments.copy is not None:
        refuse_occupied(arguments.copy)
        shutil.copytree(source, arguments.copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        print(f"wrote {arguments.copy}; for example: headrace rl {arguments.copy / DEMO}")
        return 0
    files = sorted(path for path in source.rglob("*") if path.suffix in RUN_FILES)
    width = max(len(str(path.relative_to(source))) for path in files)
    for path in files:
        first_line = path.read_text().partition("\n")[0]
        print(f"{path.relative_to(source)!s:<{width}}  {first_line.removeprefix('# ')}")
    return 0
