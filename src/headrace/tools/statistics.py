"""Statistics that several tools use."""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95
INTERVAL = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
"""The quantiles of a confidence interval."""
MAX_DRAWS_PER_CHUNK = 2_000_000
"""Bounds the memory of a bootstrap over many examples."""


def bootstrap_means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return the means of `resamples` samples with replacement."""
    rows = max(1, MAX_DRAWS_PER_CHUNK // len(values))
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    return np.concatenate([values[generator.integers(len(values), size=(n, len(values)))].mean(axis=1) for n in sizes])
