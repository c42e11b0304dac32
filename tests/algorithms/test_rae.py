"""RAE: a running baseline for each agent, and where it is after a restart."""

import msgspec
import pytest

from headrace.algorithms.base import RolloutView
from headrace.algorithms.rae import Rae
from tests.algorithms.groups import TASK, advantages, make_rollout


def group_of(*played: tuple[str, float], episodes: list[int] | None = None) -> list[RolloutView]:
    """Agent and reward of each rollout, all of one episode unless said otherwise."""
    views = []
    for place, (agent, reward) in enumerate(played):
        rollout = make_rollout(reward)
        rollout.agent, rollout.episode = agent, 0 if episodes is None else episodes[place]
        views.append(RolloutView(rollout, TASK))
    return views


async def credit(algorithm: Rae, group: list[RolloutView]) -> list[float]:
    await algorithm.score_group(group)
    return advantages(group)


async def test_credit_is_measured_from_what_was_earned_before():
    algorithm = Rae()
    assert await credit(algorithm, group_of(("policy", 1), ("policy", 1))) == pytest.approx([1, 0.95])
    assert algorithm.state() == {"policy": pytest.approx(0.0975)}  # .95 * .05 + .05
    assert await credit(algorithm, group_of(("policy", 0))) == pytest.approx([-0.0975])


async def test_each_agent_has_a_baseline_of_its_own():
    algorithm = Rae(decay=0.5)
    assert await credit(algorithm, group_of(("first", 2), ("second", -2))) == [2, -2]
    assert algorithm.state() == {"first": 1, "second": -1}
    assert await credit(algorithm, group_of(("second", -1), ("first", -1), ("third", 4))) == [0, -2, 4]


async def test_rollouts_are_taken_episode_by_episode_and_then_as_they_stand():
    # b is 0, 4, 3 with rewards 8, 2, 0 in the order of their episodes and a decay of a half
    expected = {8: 8, 2: -2, 0: -3}
    for rewards, episodes in (([8, 2, 0], [0, 1, 1]), ([2, 0, 8], [1, 1, 0]), ([2, 8, 0], [1, 0, 1])):
        found = await credit(Rae(decay=0.5), group_of(*(("policy", r) for r in rewards), episodes=episodes))
        assert dict(zip(rewards, found, strict=True)) == expected


async def test_a_state_comes_back_from_json_to_the_last_bit():
    first, second = Rae(), Rae()
    await credit(first, group_of(("player_0", 1 / 3), ("player_1", -1 / 3), ("player_0", 0.1)))
    second.load_state(msgspec.json.decode(msgspec.json.encode(first.state())))
    assert second.state() == first.state()
    played = ("player_1", 0.7), ("player_0", 1e-9)
    assert await credit(second, group_of(*played)) == await credit(first, group_of(*played))
    assert second.state() == first.state()


async def test_the_baselines_that_were_used_are_logged_by_agent():
    algorithm = Rae(decay=0.5)
    await credit(algorithm, group_of(("a", 1), ("a", 1), ("b", 3)))
    assert algorithm.tally.take() == {"baseline/a": 0.25, "baseline/b": 0}
