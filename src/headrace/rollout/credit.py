"""Credit maths: plain float64 arrays over one group of rewards."""

from __future__ import annotations

import numpy as np


def center(values: np.ndarray) -> np.ndarray:
    """Values minus their mean; exactly zero where all are equal, so that rounding never looks like a signal."""
    values = np.asarray(values, np.float64)
    if values.size == 0 or values.max() == values.min():
        return np.zeros_like(values)
    return np.asarray(values - values.mean())


def standardize(values: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """Centered values over their population standard deviation."""
    values = np.asarray(values, np.float64)
    return np.asarray(center(values) / (values.std() + epsilon))
