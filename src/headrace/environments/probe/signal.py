"""How many groups would teach nothing: the chance that all episodes of a group earn the same.

A group of g episodes of one task has no signal when its rewards are all equal. If reward v comes with probability p_v,
that happens with probability sum_v p_v^g. From n episodes of the task, k_v of which earned v:

    g <= n    sum_v C(k_v, g) / C(n, g)
    g >  n    sum_v prod_{i<g} (k_v + s q_v + i) / (n + s + i)

The first is the share of all groups of g among the n episodes whose rewards are equal: it has no bias. For the second,
no group of g was seen, and the task is taken for one like the others: its p is drawn from a Dirichlet distribution
around q, how often each reward came over all tasks. How far tasks spread around q, the one number s, is what makes all
the counts likeliest: near 0 if each task gives one reward only, large if all tasks are alike. The term is what is then
expected of p_v^g after the n episodes. Tasks are averaged, and the interval is what the average would be over other
tasks drawn from these (bootstrap, 95%).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

RESAMPLES = 2000
DIGITS = 9
"""Rewards that agree to so many digits are equal."""
STRENGTHS = np.geomspace(0.01, 100, 81)
"""Values of s that are tried."""


class Prediction(msgspec.Struct, frozen=True):
    """Shares of groups of this size."""

    group_size: int
    without_signal: float
    low: float
    high: float
    too_hard: float
    """Those without signal whose reward is below the middle between the lowest and the highest of all tasks."""
    too_easy: float
    """Those whose reward is above."""


def predict(rewards: Sequence[Sequence[float]], group_size: int, seed: int = 0) -> Prediction:
    """From the rewards of each task's episodes. Tasks without any are left out; one must have some."""
    tasks = [Counter(round(reward, DIGITS) for reward in task) for task in rewards if task]
    prior = fitted_prior(tasks)
    middle = (min(prior) + max(prior)) / 2 if len(prior) > 1 else 0.0
    chances = [chances_of_equal(task, group_size, prior) for task in tasks]
    totals = np.array([sum(chance.values()) for chance in chances])
    drawn = np.random.default_rng(seed).integers(len(totals), size=(RESAMPLES, len(totals)))
    low, high = np.percentile(totals[drawn].mean(1), (2.5, 97.5))
    return Prediction(
        group_size,
        float(totals.mean()),
        float(low),
        float(high),
        too_hard=sum(p for chance in chances for value, p in chance.items() if value <= middle) / len(tasks),
        too_easy=sum(p for chance in chances for value, p in chance.items() if value > middle) / len(tasks),
    )


def chances_of_equal(counts: Counter[float], group_size: int, prior: Mapping[float, float]) -> dict[float, float]:
    """For each reward the chance that a group of one task earns nothing else. `prior` has s q_v for each."""
    episodes = counts.total()
    if group_size <= episodes:
        return {value: math.comb(k, group_size) / math.comb(episodes, group_size) for value, k in counts.items()}
    weight = episodes + sum(prior.values())
    return {
        value: math.prod((counts[value] + share + i) / (weight + i) for i in range(group_size))
        for value, share in prior.items()
    }


def fitted_prior(tasks: Sequence[Counter[float]]) -> dict[float, float]:
    """s q_v for each reward, with the s of the greatest likelihood."""
    pooled: Counter[float] = sum(tasks, Counter())
    shares = {value: count / pooled.total() for value, count in pooled.items()}
    strength = max(STRENGTHS, key=lambda strength: _log_likelihood(tasks, shares, strength))
    return {value: float(strength * share) for value, share in shares.items()}


def _log_likelihood(tasks: Sequence[Counter[float]], shares: Mapping[float, float], strength: float) -> float:
    """Of the tasks' counts under Dirichlet-multinomial distributions, but for what does not depend on s."""
    total = 0.0
    for counts in tasks:
        total += math.lgamma(strength) - math.lgamma(strength + counts.total())
        for value, count in counts.items():
            weight = strength * shares[value]
            total += math.lgamma(weight + count) - math.lgamma(weight)
    return total
