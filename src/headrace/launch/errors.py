"""Errors of launching a run, and notices to the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import BadInput, Failure


class LaunchError(Failure):
    """A run cannot be started, or has failed. The message is complete."""


class InputRefused(LaunchError):
    """A process of the run refused its input: the same command would fail in the same way."""


class RestartNeeded(LaunchError):
    """A process set a damaged file aside: the run continues if all of its processes are started again."""


class BadRequest(BadInput, LaunchError):
    """A request that cannot be carried out; nothing has been started or changed."""


def notify(*notices: str) -> None:
    """Print notices to the terminal, beside the output."""
    for notice in notices:
        print(f"headrace: {notice}", file=sys.stderr, flush=True)


@contextmanager
def naming_run(directory: Path) -> Iterator[None]:
    """Add the run directory as a note to any exception: the error of a full disk does not name a path."""
    try:
        yield
    except Exception as error:
        error.add_note(f"run directory: {directory}")
        raise
