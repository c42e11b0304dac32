"""How much of an answer is there, and in order."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8
"""Times its length that an answer is read; what is longer would earn next to nothing, and take long to compare."""


def similarity(given: Sequence[str], wanted: Sequence[str]) -> float:
    """Twice the longest common subsequence over the summed lengths: 1 for equal texts, 0 for nothing in common."""
    if not given and not wanted:
        return 1.0
    row = [0] * (len(wanted) + 1)
    for left in given:
        diagonal = 0
        for column, right in enumerate(wanted, 1):
            diagonal, row[column] = row[column], diagonal + 1 if left == right else max(row[column], row[column - 1])
    return 2 * row[-1] / (len(given) + len(wanted))
