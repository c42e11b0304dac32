"""The result of an audit: what does not add up, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

MAX_REPORTED = 10
"""Problems of one kind that are listed; the others are counted."""


class Report(msgspec.Struct):
    """Sentences about a run, and the number of its draws by state."""

    states: dict[str, int] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    unchecked: list[str] = msgspec.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{count:8d} {state.replace(':', ': ')}" for state, count in sorted(self.states.items())]
        verdict = "everything adds up" if not self.problems else f"{len(self.problems)} problems:"
        lines += [verdict, *(f"  {problem}" for problem in self.problems)]
        return "\n".join([*lines, *(f"not checked: {what}" for what in self.unchecked)])


def shortened(problems: Iterable[str]) -> Iterator[str]:
    """Yield the first problems of one kind, then how many more there are."""
    remaining = iter(problems)
    yield from islice(remaining, MAX_REPORTED)
    if more := sum(1 for _ in remaining):
        yield f"and {more} more like the last"
