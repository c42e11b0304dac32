"""How many groups would teach nothing: the chance that all rollouts of a group earn the same.

A group of g episodes of one task has no signal when the rewards of all its rollouts are equal; several agents may be
trained in an episode. Of n episodes of the task, let k_v be those in which every rollout earned v. Then

    sum_v C(k_v, g) / C(n, g)

is the share of all groups of g among the n episodes that have no signal. It has no bias, and tasks are averaged. The
interval (95%) adds two groups of either kind to as many groups as there are tasks, and takes the normal
approximation for a share (Agresti and Coull). A task's term lies between 0 and 1, so it varies no more than one group
would: for g = n that is what it is, for smaller groups the interval is wider than it need be.

Left out on purpose: g > n. How rare the rare rewards of a task are cannot be seen from fewer episodes, and each guess
at how tasks spread is far off for some other spread. A larger group has no signal less often, so what holds for n
is a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median_high

import msgspec

DIGITS = 9
"""Rewards that agree to so many digits are equal."""
ADDED = 2
"""Groups of either kind that the interval adds."""
Z = 1.96


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
    is_bound: bool = False
    """Whether there are too few episodes: the shares are those of the largest groups that could be seen."""


def predict(rewards: Sequence[Sequence[Sequence[float]]], group_size: int) -> Prediction:
    """From the rewards of all rollouts of each episode, by task; one task must have episodes.

    A task may have fewer than the others, where some failed: it is left out if at least half of them have enough.
    """
    tasks = [[[round(reward, DIGITS) for reward in episode] for episode in task] for task in rewards if task]
    size = min(group_size, median_high(map(len, tasks)))
    chances = [chances_of_equal(task, size) for task in tasks if len(task) >= size]
    all_rewards = {reward for task in tasks for episode in task for reward in episode}
    middle = (min(all_rewards) + max(all_rewards)) / 2 if len(all_rewards) > 1 else 0.0
    share = sum(sum(chance.values()) for chance in chances) / len(chances)
    low, high = interval(share, len(chances))
    is_bound = size < group_size
    return Prediction(
        group_size,
        share,
        0.0 if is_bound else low,
        high,
        too_hard=sum(p for chance in chances for value, p in chance.items() if value <= middle) / len(chances),
        too_easy=sum(p for chance in chances for value, p in chance.items() if value > middle) / len(chances),
        is_bound=is_bound,
    )


def chances_of_equal(episodes: Sequence[Sequence[float]], group_size: int) -> dict[float, float]:
    """For each reward the share of groups of one task's episodes in which all rollouts earn it."""
    alike = Counter(episode[0] for episode in episodes if len(set(episode)) == 1)
    groups = math.comb(len(episodes), group_size)
    return {value: math.comb(count, group_size) / groups for value, count in alike.items()}


def interval(share: float, tasks: int) -> tuple[float, float]:
    """Where the share of groups without signal lies, over all tasks, if it is `share` of so many."""
    count = tasks + 2 * ADDED
    centre = (share * tasks + ADDED) / count
    reach = Z * math.sqrt(centre * (1 - centre) / count)
    return max(centre - reach, 0.0), min(centre + reach, 1.0)
