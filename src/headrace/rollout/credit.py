"""Credit maths: plain float64 arrays over one group, one value per rollout.

Everything is measured from one baseline operator, the mean over rollouts or the mean over their tokens. It is linear:
center(x + y) = center(x) + center(y), so each term of a credit may be centered by itself.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-12
"""What is smaller, relative to the numbers that it comes from, is what arithmetic has left over."""


def baseline(values: np.ndarray, lengths: np.ndarray | None = None) -> float:
    """The mean; with `lengths`, sum(length * value) / sum(length). Where nobody has any length, the mean again."""
    values = np.asarray(values, np.float64)
    if lengths is None or not np.any(lengths):
        return float(values.mean())
    lengths = np.asarray(lengths, np.float64)
    return float((lengths * values).sum() / lengths.sum())


def center(values: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    """Values minus their baseline; exactly zero where all are equal, so that rounding never looks like a signal.

    Nor does that of the values themselves: .1 + .2 is as good as .3.
    """
    values = np.asarray(values, np.float64)
    if values.size == 0 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return np.zeros_like(values)
    return np.asarray(values - baseline(values, lengths))


def standardize(values: np.ndarray, lengths: np.ndarray | None = None, epsilon: float = 1e-6) -> np.ndarray:
    """Centered values over their population standard deviation."""
    return np.asarray(center(values, lengths) / (np.std(np.asarray(values, np.float64)) + epsilon))


def max_rl(rewards: np.ndarray) -> np.ndarray:
    """Rewards minus their mean, over the mean; zero where the mean is not positive, or no more than rounding."""
    rewards = np.asarray(rewards, np.float64)
    mean = baseline(rewards)
    positive = mean > ROUNDING * np.abs(rewards).max(initial=0.0)
    return center(rewards) / mean if positive else np.zeros_like(rewards)
