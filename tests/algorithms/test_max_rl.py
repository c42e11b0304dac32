"""MaxRL and plain reward credit."""

import math

from headrace.algorithms.max_rl import MaxRl
from headrace.algorithms.reward import Reward
from tests.algorithms.groups import advantages, make_group


async def max_rl(rewards: list[float]) -> list[float]:
    group = make_group(rewards)
    await MaxRl().score_group(group)
    return advantages(group)


async def test_a_rare_success_counts_as_much_as_it_is_rare():
    assert await max_rl([1, 0, 0, 0]) == [3, -1, -1, -1]


async def test_a_group_without_success_has_no_credit():
    assert await max_rl([0, 0, 0]) == [0, 0, 0]
    assert await max_rl([-1, 0, 0.5]) == [0, 0, 0]


async def test_a_group_of_one_has_no_credit():
    assert await max_rl([1]) == [0]
    assert await max_rl([0]) == [0]


async def test_equal_rewards_have_exactly_no_credit():
    assert await max_rl([0.3] * 6) == [0.0] * 6


async def test_reward_is_credited_on_arrival_without_siblings():
    (view,) = make_group([0.75], 3)
    await Reward().score_rollout(view)
    assert view.samples[0].streams["advantages"].tolist() == [0, 0.75, 0.75, 0.75]


async def test_a_reward_that_comes_with_the_group_is_credited_then():
    group = make_group([math.nan, math.nan])
    algorithm = Reward()
    for view, reward in zip(group, [1.0, 0.5], strict=True):
        await algorithm.score_rollout(view)
        assert view.samples[0].streams == {}
        view.rollout.reward = reward
    await algorithm.score_group(group)
    assert advantages(group) == [1.0, 0.5]
