"""Credit maths over one group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.credit import center, standardize
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


def test_a_group_of_one_or_none_has_no_credit():
    assert center(np.array([0.7])).tolist() == [0.0]
    assert center(np.array([])).tolist() == []


def test_standardized_rewards_use_the_population_deviation():
    # mean 2, population variance (4 + 0 + 4) / 3
    assert standardize(np.array([0.0, 2.0, 4.0]), epsilon=0) == pytest.approx([-(1.5**0.5), 0, 1.5**0.5])


def test_integer_rewards_are_not_rounded():
    assert center(np.array([1, 0])).tolist() == [0.5, -0.5]
