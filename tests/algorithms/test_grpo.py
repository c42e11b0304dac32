"""GRPO credit as it is written on a group's samples."""

import pytest

from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.grpo import Grpo
from headrace.algorithms.length_penalties import LinearPenaltyConfig
from headrace.orchestrator.filters import has_no_advantage
from tests.algorithms.groups import advantages, make_group


async def credit(algorithm: Grpo, rewards: list[float], lengths: int | list[int] = 2) -> list[float]:
    group = make_group(rewards, lengths)
    await algorithm.score_group(group)
    return advantages(group)


async def test_credit_is_the_reward_minus_the_group_mean():
    assert await credit(Grpo(), [1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


async def test_std_normalization_divides_by_the_population_deviation():
    # mean .5, population standard deviation .5
    assert await credit(Grpo(GroupCredit("std")), [1, 1, 0, 0]) == pytest.approx([1, 1, -1, -1], abs=1e-5)


async def test_equal_rewards_give_exactly_zero_credit():
    assert await credit(Grpo(), [0.3] * 6) == [0.0] * 6
    assert await credit(Grpo(GroupCredit("std")), [0.3] * 6) == [0.0] * 6
    assert await credit(Grpo(GroupCredit(length_weighted=True)), [0.3] * 6, [1, 2, 3, 4, 5, 6]) == [0.0] * 6


async def test_every_completion_token_of_a_rollout_has_its_credit():
    group = make_group([1, 0], [4, 2], turns=[2, 1], tool_tokens=[3, 0])
    await Grpo().score_group(group)
    assert [view.samples[0].streams["advantages"].tolist() for view in group] == [[0] + [0.5] * 7, [0, -0.5, -0.5]]


async def test_an_all_correct_group_trains_under_a_length_penalty_and_only_there():
    penalized, plain = make_group([1, 1, 1], [100, 200, 600]), make_group([1, 1, 1], [100, 200, 600])
    await Grpo(GroupCredit(penalty=LinearPenaltyConfig(coef=0.25).make(1000))).score_group(penalized)
    await Grpo().score_group(plain)
    # p = [.025, .05, .15], its mean .075
    assert advantages(penalized) == pytest.approx([0.05, 0.025, -0.075])
    assert not any(has_no_advantage(view.rollout) for view in penalized)
    assert advantages(plain) == [0.0, 0.0, 0.0]
    assert all(has_no_advantage(view.rollout) for view in plain)


async def test_a_negative_pass_rate_is_counted_in_the_algorithms_tally():
    algorithm = Grpo(GroupCredit(penalty=LinearPenaltyConfig(coef=0.25).make(1000)))
    assert await credit(algorithm, [0, -1], [100, 200]) == [0.5, -0.5]
    assert await credit(algorithm, [1, 0], [100, 100]) == [0.5, -0.5]
    assert algorithm.tally.take() == {"negative_pass_rate": 1}
