"""Numbers of an evaluation: means with bootstrap intervals, and how lengths are spread. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

RESAMPLES = 1000
AT_ONCE = 1_000_000
"""Numbers that are drawn at once, for the sake of memory."""
LEVEL = 0.95
"""The share of resamples that an interval holds."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over examples, and the interval that it would be in had others been drawn."""

    value: float
    low: float
    high: float


class Spread(msgspec.Struct, frozen=True):
    """How the values of single episodes are spread; `p5` is the quantile below which 5% of them are."""

    median: float
    std: float
    min: float
    p5: float
    p25: float
    p75: float
    p95: float
    max: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of one value per example, and its percentile interval over examples drawn with replacement.

    The same seed draws the same examples, so that models which were asked the same are compared on the same draws.
    """
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    rows = max(1, AT_ONCE // len(array))
    sizes = [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
    means = np.concatenate([array[rng.integers(0, len(array), (size, len(array)))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(array.mean()), float(low), float(high))


def spread_of(values: Sequence[float]) -> Spread:
    """Return quantiles, with linear interpolation, and the standard deviation (divided by n, not n - 1)."""
    array = np.asarray(values, np.float64)
    least, p5, p25, median, p75, p95, most = np.quantile(array, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1]).tolist()
    return Spread(median, float(array.std()), least, p5, p25, p75, p95, most)
