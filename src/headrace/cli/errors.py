"""Which failures are explained in a sentence instead of a traceback: our own, and a few of the operating system."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import NamedTuple

from headrace.errors import BAD_INPUT, BadInput, Failure

FAILED = 1

EXPLAINED_ERRNOS = frozenset({errno.EACCES, errno.EADDRINUSE, errno.ENOTDIR, errno.EPERM, errno.EROFS})
"""Errors of the operating system that say enough with the path at fault."""

FULL_DISK = ("No space left on device", "Disk quota exceeded", "database or disk is full")
"""How a full disk reads when a library wraps the error."""


class Explanation(NamedTuple):
    message: str
    exit_code: int


def explain(error: BaseException) -> Explanation | None:
    """A sentence and an exit code, or None for what deserves its traceback."""
    causes = list(_chain(error))
    if any(map(_is_full_disk, causes)):
        where = [str(cause.filename) for cause in causes if isinstance(cause, OSError) and cause.filename]
        where += [note for cause in causes for note in getattr(cause, "__notes__", ())]
        place = f" ({', '.join(dict.fromkeys(where))})" if where else ""
        advice = "free some and try again; a run that had begun continues with --resume"
        return Explanation(f"no space left on device{place}: {advice}", FAILED)
    if any(map(_is_of_peer, causes)):
        return Explanation("another rank is gone; what it said comes before this", FAILED)
    if isinstance(error, Failure):
        return Explanation(str(error), BAD_INPUT if isinstance(error, BadInput) else FAILED)
    if isinstance(error, OSError) and error.errno in EXPLAINED_ERRNOS:
        return Explanation(f"{error.strerror}{f': {error.filename}' if error.filename else ''}", FAILED)
    return None


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in FULL_DISK)


def _is_of_peer(error: BaseException) -> bool:
    """Whether torch could not talk to another rank; by name, since commands without ranks never import torch."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
