"""Length penalties and bonuses in units of reward, over one group.

The linear penalty is a price times the group's pass rate: a group that mostly fails should learn to be correct before
it learns to be short.
"""

from __future__ import annotations

import numpy as np

from headrace.rollout.cohort import Cohort


def price_by_seq_len(cohort: Cohort, coef: float, seq_len: int) -> np.ndarray:
    """Return coef * tokens / seq_len per rollout."""
    return np.asarray(coef * cohort.output_tokens / seq_len)


def price_by_group_max(cohort: Cohort, output_weight: float, input_weight: float, turns_weight: float) -> np.ndarray:
    """Return the weighted sum of output tokens, context tokens and turns, each divided by the group's maximum."""
    return np.asarray(
        output_weight * _share_of_largest(cohort.output_tokens)
        + input_weight * _share_of_largest(cohort.context_tokens)
        + turns_weight * _share_of_largest(cohort.turns)
    )


def _share_of_largest(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return np.asarray(values / largest) if largest > 0 else np.zeros_like(values)


def linear(price: np.ndarray, rewards: np.ndarray, *, gated: bool) -> np.ndarray:
    """Return pass_rate * price, the pass rate clamped at 0; `gated`: only for rollouts with reward 1, 0 for others."""
    penalty = max(float(rewards.mean()), 0.0) * price
    return np.where(rewards == 1, penalty, 0.0) if gated else np.asarray(penalty)


def overlong(tokens: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """Return 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens (DAPO, arXiv 2503.14476)."""
    return np.clip((tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)


def efficiency_bonus(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the bonus of rollouts with the largest reward for costing less than the mean of those rollouts.

    r * clamp(1 - cost / mean_correct_cost, 0, 1), so at most r; 0 for other rollouts, and for all if the largest
    reward or that mean is not positive.
    """
    best = rewards.max()
    correct = rewards == best
    mean_cost = cost[correct].mean()
    if best <= 0 or mean_cost <= 0:
        return np.zeros_like(rewards)
    return np.where(correct, rewards * np.clip(1 - cost / mean_cost, 0.0, 1.0), 0.0)
