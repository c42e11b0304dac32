"""Histograms of a step with fixed bins, as compact texts in `metrics.jsonl`.

The text is `SUM FIRST COUNT,COUNT,...`: the sum of all values, the first bin that is not empty, and the counts from
there to the last one that is not. Bins are spaced evenly in the logarithm, of advantages on both sides of 0, of ratios
on both sides of 1. Bin i has the values above bound i - 1, up to bound i; the last bin has all above the last bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

PREFIX = "histogram/"
"""Beginning of the names of histograms in records."""
PER_DECADE = 4


def _both_sides(first: int, last: int) -> list[float]:
    """Return bounds from -10^last over -10^first and 10^first to 10^last."""
    positive = [10 ** (k / PER_DECADE) for k in range(first * PER_DECADE, last * PER_DECADE + 1)]
    return [*(-bound for bound in reversed(positive)), *positive]


BOUNDS: dict[str, tuple[float, ...]] = {
    "advantages": tuple(_both_sides(-3, 2)),
    "decode_len": tuple(2 ** (k / 2) for k in range(41)),
    "ratio": tuple(math.exp(bound) for bound in _both_sides(-4, 1)),
}
"""Upper bounds of the bins, by name. They must not change: recorded runs have them."""


@dataclass(frozen=True)
class Counts:
    """A histogram: the values in each bin, one more than there are bounds, and their sum."""

    counts: np.ndarray
    total: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.counts + other.counts, self.total + other.total)

    def buckets(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts from the first filled bin to the last one, and their edges, one more, all finite."""
        bounds = BOUNDS[name]
        edges = np.array([2 * bounds[0] - bounds[1], *bounds, 2 * bounds[-1] - bounds[-2]])
        filled = np.flatnonzero(self.counts)
        first, last = (filled[0], filled[-1]) if len(filled) else (0, 0)
        return self.counts[first : last + 1], edges[first : last + 2]

    def encode(self) -> str:
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return f"{self.total:.6g} 0 0"
        first, last = int(filled[0]), int(filled[-1])
        return f"{self.total:.6g} {first} {','.join(map(str, self.counts[first : last + 1].tolist()))}"


def count(name: str, values: Iterable[float]) -> Counts:
    """Count values in the bins of a histogram; those that are not finite are left out."""
    array = np.fromiter(values, np.float64)
    array = array[np.isfinite(array)]
    bins = np.searchsorted(BOUNDS[name], array)
    return Counts(np.bincount(bins, minlength=len(BOUNDS[name]) + 1), float(array.sum()))


def decode(name: str, text: str) -> Counts:
    """Read a text of `encode`; raises `ValueError` if it is not one of this histogram."""
    total, first, listed = text.split(" ")
    values = np.array([int(number) for number in listed.split(",")])
    counts = np.zeros(len(BOUNDS[name]) + 1, np.int64)
    counts[int(first) : int(first) + len(values)] = values  # raises if they are too many
    return Counts(counts, float(total))
