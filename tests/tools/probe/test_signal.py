"""The share of groups without signal: worked by hand, against enumeration and against simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest

from headrace.tools.probe.report import SignalPrediction
from headrace.tools.probe.sampling import predict_signal, proportion_interval

Draw = Callable[[np.random.Generator, int], np.ndarray]

POPULATIONS: dict[str, Draw] = {
    "all alike": lambda rng, count: np.full(count, 0.5),
    "all hard": lambda rng, count: np.full(count, 0.02),
    "evenly spread": lambda rng, count: rng.random(count),
    "at both ends": lambda rng, count: rng.beta(0.3, 0.3, count),
    "mostly hard": lambda rng, count: rng.beta(0.1, 2, count),
    "hopeless or even": lambda rng, count: np.where(rng.random(count) < 0.7, 0, 0.5),
    "hopeless or easy": lambda rng, count: np.where(rng.random(count) < 0.9, 0, 0.9),
}
"""How likely tasks are to be solved."""


def alone(rewards: Sequence[Sequence[float]], group_size: int) -> SignalPrediction:
    """Of episodes in which one agent is trained."""
    return predict_signal([[[reward] for reward in task] for task in rewards], group_size)


def test_groups_of_two_from_four_episodes_by_hand():
    # of the 6 pairs from 1, 1, 1, 0 three are equal
    assert alone([[1, 1, 1, 0]], 2).without_signal == 0.5
    # no pair of 4 different rewards is
    assert alone([[0.1, 0.2, 0.3, 0.4]], 2).without_signal == 0


def test_a_group_of_all_episodes_has_no_signal_only_if_all_are_equal():
    assert alone([[1, 1, 1, 0], [0, 0, 0, 0]], 4).without_signal == 0.5


def test_rewards_that_differ_by_rounding_alone_are_equal():
    assert alone([[0.1 + 0.2, 0.3]], 2).without_signal == 1


def test_a_group_in_which_agents_earn_differently_has_signal():
    # what one wins the other loses: their mean is always 0, their rewards never are
    assert predict_signal([[[1, -1], [-1, 1], [1, -1], [1, -1]]], 2).without_signal == 0
    # of the three pairs only that of the two draws has equal rewards
    assert predict_signal([[[0, 0], [0, 0], [1, -1]]], 2).without_signal == pytest.approx(1 / 3)
    assert predict_signal([[[0, 0], [1, 1]]], 2).without_signal == 0


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_it_is_the_share_of_all_groups(group_size: int):
    rewards = [0, 0, 0.5, 1, 1, 1, 1]
    groups = list(combinations(rewards, group_size))
    equal = sum(len(set(group)) == 1 for group in groups) / len(groups)
    assert alone([rewards], group_size).without_signal == pytest.approx(equal)


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("group_size", [4, 8])
def test_the_estimate_has_no_bias_and_the_interval_covers_the_truth(population: str, group_size: int):
    rng = np.random.default_rng(0)
    everywhere = POPULATIONS[population](rng, 200_000)
    truth = (everywhere**group_size + (1 - everywhere) ** group_size).mean()
    found = []
    for _ in range(200):  # as often 8 episodes of each of 16 tasks
        solved = rng.random((16, 8)) < POPULATIONS[population](rng, 16)[:, None]
        found.append(alone(solved.astype(float).tolist(), group_size))
    # a task's term has standard deviation .5 at most: that of the mean of 200 * 16 is below .009
    assert np.mean([p.without_signal for p in found]) == pytest.approx(truth, abs=0.027)
    # 95% of 200, less two standard deviations of .015
    assert np.mean([p.low <= truth <= p.high for p in found]) >= 0.92


def test_the_interval_by_hand():
    # none of 16: 2 of 20, .1 +- 1.96 sqrt(.09 / 20); half of 20: .5 +- 1.96 sqrt(.25 / 24)
    assert proportion_interval(0.0, 16) == (0, pytest.approx(0.2315, abs=1e-4))
    assert proportion_interval(1.0, 16) == (pytest.approx(0.7685, abs=1e-4), 1)
    assert proportion_interval(0.5, 20) == pytest.approx((0.29996, 0.70004), abs=1e-4)


def test_larger_groups_than_were_seen_have_what_was_seen_for_a_bound():
    seen = [[0, 0, 1, 1], [0, 0, 0, 0]]
    four, larger = alone(seen, 4), alone(seen, 32)
    assert (four.is_bound, larger.is_bound) == (False, True)
    assert (larger.group_size, larger.without_signal, larger.high) == (32, 0.5, four.high)
    assert larger.low == 0  # it may be as low as it likes
    assert (larger.too_hard, larger.too_easy) == (0.5, 0)


def test_a_task_with_failed_episodes_is_left_out_unless_most_are_like_that():
    few_failed = alone([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1]], 4)
    assert (few_failed.without_signal, few_failed.is_bound) == (0.5, False)
    most_failed = alone([[0, 0, 0, 0], [0, 0, 1], [1, 1, 1]], 4)
    assert (most_failed.without_signal, most_failed.is_bound) == (pytest.approx(2 / 3), True)


def test_too_easy_and_too_hard_are_distinguished():
    prediction = alone([[0] * 4, [0] * 4, [1] * 4, [0, 1, 0, 1]], 4)
    assert (prediction.too_hard, prediction.too_easy) == (0.5, 0.25)
    assert prediction.without_signal == 0.75
    # a bonus does not make a solved task another one: 1.0 and 1.3 are both above the middle of 0 and 1.3
    bonus = alone([[1.0] * 4, [1.3] * 4, [0] * 4], 4)
    assert (bonus.too_hard, bonus.too_easy) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    # if all rewards are the same, its sign decides
    assert (alone([[0, 0]], 2).too_hard, alone([[1, 1]], 2).too_easy) == (1, 1)


def test_tasks_without_episodes_are_left_out():
    assert alone([[], [1, 1]], 2).without_signal == 1
