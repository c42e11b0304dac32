"""What rewards come to."""

import math

import pytest

from headrace.rollout.fitness import total_reward


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
