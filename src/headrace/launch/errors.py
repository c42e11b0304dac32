"""Why a launch cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import BadInput, Failure


class LaunchError(Failure):
    """The message is complete: print it and stop."""


class InputRefused(LaunchError):
    """A process of the run ended because of something that the user gave: the same command would end the same way."""


class BadRequest(BadInput, LaunchError):
    """What was asked for cannot be done; nothing has been started or changed."""


@contextmanager
def naming_run(directory: Path) -> Iterator[None]:
    """Whatever goes wrong inside says which run it happened to: a full disk alone does not name its path."""
    try:
        yield
    except Exception as error:
        error.add_note(f"run directory: {directory}")
        raise
