"""One process of a kind at a time in a run: a second one would write over the first one's files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import BadInput
from headrace.transport.run_dir import RunDir


@contextmanager
def only_one(run: RunDir, process: str) -> Iterator[None]:
    """The lock goes with the process, however it ends."""
    run.root.mkdir(parents=True, exist_ok=True)
    with open(run.root / f".{process}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"another {process} is at work in {run.root}: stop it first") from error
        yield
