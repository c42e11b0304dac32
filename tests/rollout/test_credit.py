"""Credit maths over one group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.checks import LARGEST_REWARD
from headrace.rollout.credit import baseline, center, max_rl, standardize
from tests.rollout.strategies import FIXED


def test_centered_rewards_are_the_distance_from_the_mean():
    assert center(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_six_equal_rewards_center_to_exactly_zero():
    assert center(np.array([0.3] * 6)).tolist() == [0.0] * 6
    assert standardize(np.array([0.3] * 6)).tolist() == [0.0] * 6


def test_rounding_of_the_mean_does_not_look_like_a_signal():
    # 0.1 + 0.1 + 0.1 is 0.30000000000000004 in float64, and a third of that is not 0.1
    rewards = np.array([0.1] * 3)
    assert (rewards - rewards.mean()).any()
    assert center(rewards).tolist() == [0.0] * 3


@FIXED
@given(st.floats(-1e9, 1e9), st.integers(1, 64))
def test_equal_rewards_never_carry_a_signal(reward: float, size: int):
    assert not center(np.full(size, reward)).any()


@pytest.mark.parametrize("credit", [center, standardize, max_rl])
def test_rewards_that_differ_by_rounding_alone_carry_no_signal(credit):
    assert credit(np.array([0.1 + 0.2, 0.3, 0.3, 0.3])).tolist() == [0.0] * 4


@pytest.mark.parametrize("credit", [center, standardize, max_rl])
@pytest.mark.parametrize("rewards", [(1.0, -1.0), (1.0, 0.0, 0.0), (1.0, -0.5, -0.5 + 1e-9)])
def test_the_credit_of_the_largest_rewards_can_be_kept_as_float32(credit, rewards: tuple[float, ...]):
    assert np.isfinite(credit(LARGEST_REWARD * np.array(rewards)).astype(np.float32)).all()


@pytest.mark.parametrize("rewards", [(1.0, -1.0, 1e-300), (0.1, 0.2, -0.3)])
def test_a_mean_that_is_rounding_alone_is_not_divided_by(rewards: tuple[float, ...]):
    assert np.mean(rewards) > 0
    assert max_rl(np.array(rewards)).tolist() == [0.0] * 3


def test_a_group_of_one_or_none_has_no_credit():
    assert center(np.array([0.7])).tolist() == [0.0]
    assert center(np.array([])).tolist() == []


def test_standardized_rewards_use_the_population_deviation():
    # mean 2, population variance (4 + 0 + 4) / 3
    assert standardize(np.array([0.0, 2.0, 4.0]), epsilon=0) == pytest.approx([-(1.5**0.5), 0, 1.5**0.5])


def test_integer_rewards_are_not_rounded():
    assert center(np.array([1, 0])).tolist() == [0.5, -0.5]


def test_a_baseline_is_the_mean_over_rollouts_or_over_their_tokens():
    rewards, lengths = np.array([1.0, 0.0]), np.array([100.0, 300.0])
    assert baseline(rewards) == 0.5
    assert baseline(rewards, lengths) == 0.25
    assert center(rewards, lengths).tolist() == [0.75, -0.25]


def test_length_weighted_credit_sums_to_zero_over_tokens():
    rewards, lengths = np.array([1.0, 0.5, 0.0]), np.array([10.0, 20.0, 50.0])
    assert (lengths * center(rewards, lengths)).sum() == pytest.approx(0, abs=1e-12)


def test_without_any_token_the_baseline_over_tokens_is_the_mean():
    assert baseline(np.array([1.0, 0.0]), np.zeros(2)) == 0.5
    assert center(np.array([1.0, 0.0]), np.zeros(2)).tolist() == [0.5, -0.5]


def test_equal_rewards_of_unequal_lengths_center_to_exactly_zero():
    rewards, lengths = np.array([0.3] * 3), np.array([1.0, 2.0, 4.0])
    assert (rewards - baseline(rewards, lengths)).any()
    assert center(rewards, lengths).tolist() == [0.0] * 3
    assert standardize(rewards, lengths).tolist() == [0.0] * 3


def test_standardized_length_weighted_rewards_are_over_the_plain_deviation():
    # baseline .25, population standard deviation .5
    credit = standardize(np.array([1.0, 0.0]), np.array([100.0, 300.0]), epsilon=0)
    assert credit.tolist() == [1.5, -0.5]


@FIXED
@given(st.permutations([(1.0, 10), (0.3, 40), (0.3, 0), (0.0, 25), (0.7, 999), (1.0, 3)]))
def test_credit_follows_its_rollout_in_any_order(members: list[tuple[float, int]]):
    rewards, lengths = np.array(members, np.float64).T
    order = np.lexsort((lengths, rewards))
    for credit in (center, standardize):
        assert credit(rewards[order], lengths[order]) == pytest.approx(credit(rewards, lengths)[order], abs=1e-12)
    assert max_rl(rewards[order]) == pytest.approx(max_rl(rewards)[order], abs=1e-12)


def test_max_rl_measures_rewards_in_units_of_their_mean():
    assert max_rl(np.array([1, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert max_rl(np.array([1, 1, 0, 0])).tolist() == [1, 1, -1, -1]


def test_max_rl_gives_nothing_where_the_mean_is_not_positive():
    assert max_rl(np.array([0.0, 0.0])).tolist() == [0, 0]
    assert max_rl(np.array([1.0, -1.0])).tolist() == [0, 0]
    assert max_rl(np.array([0.5, -1.0])).tolist() == [0, 0]


def test_max_rl_of_equal_rewards_is_exactly_zero():
    assert max_rl(np.array([0.3] * 6)).tolist() == [0.0] * 6
    assert max_rl(np.array([1.0])).tolist() == [0.0]
