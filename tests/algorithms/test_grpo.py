"""GRPO credit, and how a view writes it."""

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView
from headrace.algorithms.grpo import Grpo
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Rollout, Turn


def rollout(reward: float, *completions: list[int]) -> Rollout:
    """One sample per completion: their prompts share no prefix."""
    turns = [Turn([100 + n], ids, [-1.0] * len(ids), [0] * len(ids), 1.0) for n, ids in enumerate(completions)]
    return Rollout(reward=reward, turns=turns, samples=merge_turns(turns))


async def credit(algorithm: Grpo, rewards: list[float]) -> list[float]:
    group = [rollout(reward, [1, 2]) for reward in rewards]
    await algorithm.score_group([RolloutView(member) for member in group])
    return [float(member.samples[0].streams["advantages"][-1]) for member in group]


async def test_credit_is_the_reward_minus_the_group_mean():
    assert await credit(Grpo(), [1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


async def test_std_normalization_divides_by_the_population_deviation():
    # mean .5, population standard deviation .5
    assert await credit(Grpo("std"), [1, 1, 0, 0]) == pytest.approx([1, 1, -1, -1], abs=1e-5)


async def test_equal_rewards_give_exactly_zero_credit():
    assert await credit(Grpo(), [0.3] * 6) == [0.0] * 6
    assert await credit(Grpo("std"), [0.3] * 6) == [0.0] * 6


def test_a_scalar_is_broadcast_over_completions_and_prompts_get_zero():
    member = rollout(1.0, [1, 2], [3])
    RolloutView(member).assign_advantages(0.5)
    assert [sample.streams["advantages"].tolist() for sample in member.samples] == [[0, 0.5, 0.5], [0, 0.5]]


def test_per_token_credit_is_sliced_across_samples_in_order():
    member = rollout(1.0, [1, 2], [3])
    RolloutView(member).assign_advantages(np.array([0.1, 0.2, 0.3]))
    assert member.samples[0].streams["advantages"].tolist() == pytest.approx([0, 0.1, 0.2])
    assert member.samples[1].streams["advantages"].tolist() == pytest.approx([0, 0.3])


def test_credit_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 advantages for 3 completion tokens"):
        RolloutView(rollout(1.0, [1, 2], [3])).assign_advantages([0.1, 0.2])
