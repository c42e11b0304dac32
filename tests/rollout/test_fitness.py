"""What rewards come to, and which rollouts can be used."""

import math
from typing import Any

import pytest

from headrace.rollout.fitness import LARGEST_REWARD, check, total_reward
from headrace.rollout.types import Rollout, RolloutError, Turn


def rollout(**fields: Any) -> Rollout:
    return Rollout(**{"rewards": {"r": 1.0}, "turns": [Turn([1], [2, 3], [-0.5, -0.5], [0, 0], 1.0)]} | fields)


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ((0.7, 0.2, 0.1), 1.0),  # one after the other they make 0.9999999999999999
        ((0.1,) * 10, 1.0),
        ((0.5, -0.25), 0.25),
        ((), math.nan),
        ((math.inf, -math.inf), math.nan),
        ((1e308, 1e308), math.nan),
        ((1.0, math.inf), math.inf),
    ],
)
def test_a_rollouts_rewards_are_added_up_and_rounded_once(parts: tuple[float, ...], total: float):
    rewards = {str(number): part for number, part in enumerate(parts)}
    assert total_reward(rewards) == pytest.approx(total, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("reward", [1e39, -1e39, 1.01 * LARGEST_REWARD])
def test_a_reward_too_large_to_credit_is_an_error_of_its_rollout_that_names_it(reward: float):
    huge = rollout(rewards={"speed": reward})
    check(huge, scored_later=False)
    assert math.isnan(huge.reward)
    assert huge.error == RolloutError(
        "invalid_reward", f"rewards {{'speed': {reward}}} sum to {reward:g}: beyond 1e+30 nothing can be credited"
    )


def test_the_largest_reward_is_a_reward():
    large = rollout(rewards={"r": -LARGEST_REWARD})
    check(large, scored_later=False)
    assert (large.error, large.reward) == (None, -LARGEST_REWARD)
