"""What several tools use: the type of progress callbacks, short names of paths, and the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ReportProgress = Callable[..., None]
"""Called with what is being done and, where they are known, the number of finished steps and of all steps."""


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of each path, as few as distinguish all of them."""
    parts = [path.split("/") for path in paths]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


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
