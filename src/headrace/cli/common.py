"""Arguments that several commands have, overrides of the configuration, and a progress line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import BadInput

if TYPE_CHECKING:  # brings Arrow, and rich
    from headrace.observe.console import SafeConsole
    from headrace.transport.rollout_files import RolloutFiles

RUN_FILES = (".toml", ".yaml", ".yml")
"""Suffixes of run files."""
OWN_OPTIONS = {
    *("--dry-run", "--clean", "--resume", "--help", "--name", "--alone", "--sharing"),
    *("--report", "--format", "--print", "--output"),
}
"""Options of the commands themselves; every other `--word` is an override of the configuration."""


def add_run_arguments(parser: argparse.ArgumentParser, override: str) -> None:
    """Add the arguments of a command that starts a run from files; `override` is an example of an override."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="run files, merged left to right")
    add_start_options(parser, override)


def add_start_options(parser: argparse.ArgumentParser, override: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    again = parser.add_mutually_exclusive_group()
    add_resume(again)
    again.add_argument("--clean", action="store_true", help="delete the run that is in output_dir and start over")
    parser.epilog = f"Any key can be set on top of the files: --section.key value, for example {override}"


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("svg", "png", "pdf"),
        default="svg",
        help="write each plot in this format, too, beside the SVG [svg]",
    )


def add_resume(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="latest|STEP|PATH",
        help="continue the run from its newest checkpoint, or from this one",
    )


def separate_overrides(argv: Sequence[str], dotted: bool = False) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments of the command and the overrides of the configuration.

    With `dotted`, for a command of many options, only `--section.key` is an override.
    """
    own: list[str] = []
    overrides: list[str] = []
    pending = list(argv)
    while pending:
        word = pending.pop(0)
        option = word.partition("=")[0]
        value_follows = bool(pending) and not pending[0].startswith("--")
        if word == "--resume":
            # Its value may be left out, and a run file after it is not the value.
            has_value = value_follows and Path(pending[0]).suffix not in RUN_FILES
            own.append(f"--resume={pending.pop(0) if has_value else 'latest'}")
        elif word.startswith("--") and ("." in option if dotted else option not in OWN_OPTIONS):
            overrides.append(word)
            if "=" not in word and value_follows:
                overrides.append(pending.pop(0))
        elif word.startswith("@"):  # the syntax of other systems
            print("headrace: a run file needs no @ before it", file=sys.stderr)
            own += [word[1:]] if word != "@" else []
        else:
            own.append(word)
    return own, overrides


def importable(target: str, what: str) -> str:
    """Return the import path of `my_file.py:Name`, whose folder is added to the path; other names are unchanged."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as in a run
    file, separator, name = target.partition(":")
    if not file.endswith(".py"):
        return target
    path = Path(file)
    if not path.is_file():
        raise BadInput("no such file", file=path)
    if not (separator and name):
        raise BadInput(f"the {what} in it is not named", file=path, fix=f"Write {path}:NAME.")
    sys.path.insert(0, str(path.resolve().parent))
    return f"{path.stem}:{name}"


def refuse_occupied(directory: Path) -> None:
    """Raise `BadInput` unless `directory` can be written: it does not exist, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput("exists and is not an empty directory", key="DIR", value=directory, fix="Give another.")


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def output_console(pipe_width: int) -> SafeConsole:
    """Return a console of the standard output, which has `pipe_width` columns if it is not a terminal."""
    from headrace.observe.console import SafeConsole

    return SafeConsole(width=None if sys.stdout.isatty() else pipe_width)


@contextmanager
def progress_line() -> Iterator[Callable[..., None]]:
    """Show a line on the terminal; yields a function of what is being done and, optionally, how much of a total."""
    from headrace.observe.console import SafeConsole

    with SafeConsole(stderr=True).status("") as status:

        def show(what: str, done: int = 0, total: int = 0) -> None:
            status.update(f"{what} ({done}/{total})" if total else what)

        yield show


def step_span(text: str) -> tuple[int | None, int | None]:
    """Parse `A:B`, inclusive, with either left out, or one step."""
    first, colon, last = text.partition(":")
    parts = [first, last if colon else first]
    if not any(parts) or not all(part == "" or part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps, as 10:20, 10: or 10 is")
    return (int(parts[0]) if parts[0] else None, int(parts[1]) if parts[1] else None)


def choose_steps(files: RolloutFiles, span: tuple[int | None, int | None]) -> list[int]:
    """Return the saved steps in `span`; raises `BadInput` if there are none."""
    saved = files.steps()
    if not saved:
        raise BadInput("no rollouts are saved here; a run saves those of every step", file=files.directory)
    first, last = span
    chosen = [step for step in saved if (first is None or step >= first) and (last is None or step <= last)]
    if not chosen:
        raise BadInput(
            f"{files.directory} has {format_steps(saved)}",
            key="--steps",
            value=f"{'' if first is None else first}:{'' if last is None else last}",
            fix="A run keeps the newest orchestrator.keep_rollouts steps.",
        )
    return chosen


def format_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    gaps = "" if len(steps) == steps[-1] - steps[0] + 1 else f" ({len(steps)} of them)"
    return f"steps {steps[0]} to {steps[-1]}{gaps}"
