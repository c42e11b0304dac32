"""An exception of a user's code, told in words that can be sent, logged and recorded.

Its text may quote what is no valid Unicode, and its own `__str__` may raise.
"""

from __future__ import annotations

import traceback

import msgspec

from headrace.rollout.types import printable

FRAMES = 30
"""The innermost frames of a traceback that are told; a runaway recursion has thousands."""
CANCELLED_ITSELF = "CancelledError: the environment cancelled its own episode"


class Fault(msgspec.Struct, frozen=True):
    """`place` tells where in the code it was raised, so that each place is reported once."""

    kind: str
    message: str
    place: str
    traceback: str

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.message}"


def fault_of(error: BaseException) -> Fault:
    summary = traceback.TracebackException.from_exception(error, limit=-FRAMES)
    kind = printable(type(error).__name__)
    where = f" {summary.stack[-1].filename}:{summary.stack[-1].lineno}" if summary.stack else ""
    return Fault(kind, printable(str(summary)), printable(f"{kind}{where}"), printable("".join(summary.format())))
