"""The share of groups without signal: worked by hand, against enumeration and against simulation."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from headrace.environments.probe.signal import chances_of_equal, fitted_prior, predict


def test_groups_of_two_from_four_episodes_by_hand():
    # of the 6 pairs from 1, 1, 1, 0 three are equal
    assert predict([[1, 1, 1, 0]], 2).without_signal == 0.5
    # no pair of 4 different rewards is
    assert predict([[0.1, 0.2, 0.3, 0.4]], 2).without_signal == 0


def test_a_group_of_all_episodes_has_no_signal_only_if_all_are_equal():
    assert predict([[1, 1, 1, 0], [0, 0, 0, 0]], 4).without_signal == 0.5


def test_rewards_that_differ_by_rounding_alone_are_equal():
    assert predict([[0.1 + 0.2, 0.3]], 2).without_signal == 1


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_up_to_the_number_of_episodes_it_is_the_share_of_all_groups(group_size: int):
    rewards = [0, 0, 0.5, 1, 1, 1, 1]
    groups = list(combinations(rewards, group_size))
    equal = sum(len(set(group)) == 1 for group in groups) / len(groups)
    assert predict([rewards], group_size).without_signal == pytest.approx(equal)


def test_up_to_the_number_of_episodes_it_has_no_bias():
    # p = .8, groups of 4: .8^4 + .2^4 = .4112; 1000 times from 8 episodes, standard error below .012
    drawn = (np.random.default_rng(0).random((1000, 8)) < 0.8).astype(float)
    assert predict(drawn.tolist(), 4).without_signal == pytest.approx(0.4112, abs=0.03)


def test_beyond_the_number_of_episodes_by_hand():
    # one right of two, s q = 1/2 for either: weights 1.5 and 1.5 of 3, so (1.5 * 2.5 * 3.5) / (3 * 4 * 5) each
    chances = chances_of_equal(Counter([0.0, 1.0]), 3, {0.0: 0.5, 1.0: 0.5})
    assert chances == {0.0: pytest.approx(13.125 / 60), 1.0: pytest.approx(13.125 / 60)}
    # one right of one: 1.5 and 0.5 of 2: (1.5 * 2.5) / (2 * 3) and (0.5 * 1.5) / (2 * 3)
    chances = chances_of_equal(Counter([1.0]), 2, {0.0: 0.5, 1.0: 0.5})
    assert chances == {0.0: pytest.approx(0.75 / 6), 1.0: pytest.approx(3.75 / 6)}


@pytest.mark.parametrize("strength", [0.2, 1.0, 10.0])
def test_beyond_the_number_of_episodes_it_agrees_with_simulated_tasks(strength: float):
    # 400 tasks whose p is Beta(.3 s, .7 s): 4 episodes of each predict groups of 8 and 16
    rng = np.random.default_rng(1)
    p = rng.beta(0.3 * strength, 0.7 * strength, 400)
    drawn = (rng.random((len(p), 4)) < p[:, None]).astype(float).tolist()
    for size in (8, 16):
        truth = (p**size + (1 - p) ** size).mean()
        assert predict(drawn, size).without_signal == pytest.approx(truth, abs=0.06)


def test_tasks_that_are_always_or_never_solved_stay_so_in_larger_groups():
    assert predict([[0] * 8, [1] * 8] * 8, 32).without_signal == pytest.approx(1, abs=0.02)


def test_tasks_that_are_all_alike_have_signal_in_larger_groups():
    # each 2 of 4: p is .5 for all of them, and .5^8 + .5^8 is .008
    assert predict([[0, 0, 1, 1]] * 16, 8).without_signal == pytest.approx(0.008, abs=0.005)


def test_a_spread_of_tasks_is_fitted_by_its_strength():
    # Beta(1, 1) is s = 2, q = .5; of 1000 tasks the fit is close
    rng = np.random.default_rng(2)
    drawn = rng.binomial(8, rng.random(1000))
    prior = fitted_prior([Counter({1.0: int(k), 0.0: 8 - int(k)}) for k in drawn])
    assert sum(prior.values()) == pytest.approx(2, rel=0.2)


def test_too_easy_and_too_hard_are_told_apart():
    prediction = predict([[0] * 4, [0] * 4, [1] * 4, [0, 1, 0, 1]], 4)
    assert (prediction.too_hard, prediction.too_easy) == (0.5, 0.25)
    assert prediction.without_signal == 0.75
    # a bonus does not make a solved task another one: 1.0 and 1.3 are both above the middle of 0 and 1.3
    bonus = predict([[1.0] * 4, [1.3] * 4, [0] * 4], 4)
    assert (bonus.too_hard, bonus.too_easy) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    # if all rewards are the same, its sign decides
    assert (predict([[0, 0]], 2).too_hard, predict([[1, 1]], 2).too_easy) == (1, 1)


def test_the_interval_is_over_tasks():
    certain = predict([[0, 1]] * 20, 2)
    assert (certain.low, certain.high) == (0, 0)
    # 20 tasks, half of them without signal: the mean of 20 has standard deviation sqrt(.25 / 20) = .112
    mixed = predict([[0, 1], [1, 1]] * 10, 2)
    assert mixed.low == pytest.approx(0.5 - 1.96 * 0.112, abs=0.06)
    assert mixed.high == pytest.approx(0.5 + 1.96 * 0.112, abs=0.06)


def test_tasks_without_episodes_are_left_out():
    assert predict([[], [1, 1]], 2).without_signal == 1
