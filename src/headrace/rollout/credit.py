"""Credit maths: float64 arrays over one group, one value per rollout.

The baseline is the mean over rollouts or the mean over their tokens. Both are linear: center(x + y) = center(x) +
center(y), so each term of a credit may be centered separately.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-12
"""Relative size below which a difference counts as rounding error."""


def baseline(values: np.ndarray, lengths: np.ndarray | None = None) -> float:
    """Return the mean; with `lengths` that are not all 0, sum(length * value) / sum(length)."""
    values = np.asarray(values, np.float64)
    if lengths is None or not np.any(lengths):
        return float(values.mean())
    lengths = np.asarray(lengths, np.float64)
    return float((lengths * values).sum() / lengths.sum())


def center(values: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    """Return values minus their baseline; exactly zero if all are equal up to rounding (.1 + .2 equals .3)."""
    values = np.asarray(values, np.float64)
    if values.size == 0 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return np.zeros_like(values)
    return np.asarray(values - baseline(values, lengths))


def standardize(values: np.ndarray, lengths: np.ndarray | None = None, epsilon: float = 1e-6) -> np.ndarray:
    """Return centered values over their population standard deviation."""
    return np.asarray(center(values, lengths) / (np.std(np.asarray(values, np.float64)) + epsilon))


def max_rl(rewards: np.ndarray) -> np.ndarray:
    """Return (rewards - mean) / mean; zeros if the mean is not positive beyond rounding."""
    rewards = np.asarray(rewards, np.float64)
    mean = baseline(rewards)
    positive = mean > ROUNDING * np.abs(rewards).max(initial=0.0)
    return center(rewards) / mean if positive else np.zeros_like(rewards)
