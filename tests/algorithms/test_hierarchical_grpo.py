"""Hierarchical GRPO: peers share their agent, and for some agents the episode."""

import logging

import pytest

from headrace.algorithms.hierarchical_grpo import HierarchicalGrpo
from tests.algorithms.groups import advantages
from tests.algorithms.test_rae import group_of

EPISODES = [0, 0, 0, 1, 1, 1]
PLAYED = [("proposer", 0.5), ("solver", 1), ("solver", 0), ("proposer", 1), ("solver", 1), ("solver", 1)]


async def credit(algorithm: HierarchicalGrpo, played, episodes) -> list[float]:
    group = group_of(*played, episodes=episodes)
    await algorithm.score_group(group)
    return advantages(group)


async def test_peers_are_of_the_same_agent_in_the_group():
    # proposers .5 and 1; solvers 1, 0, 1, 1
    assert await credit(HierarchicalGrpo(), PLAYED, EPISODES) == [-0.25, 0.25, -0.75, 0.25, 0.25, 0.25]


async def test_episode_agents_are_compared_within_their_episode():
    algorithm = HierarchicalGrpo(["solver"])
    assert await credit(algorithm, PLAYED, EPISODES) == [-0.25, 0.5, -0.5, 0.25, 0, 0]
    assert algorithm.tally.take() == {"without_peers": 0}


async def test_the_order_of_arrival_does_not_matter():
    places = [5, 2, 0, 4, 1, 3]
    moved = await credit(HierarchicalGrpo(["solver"]), [PLAYED[p] for p in places], [EPISODES[p] for p in places])
    assert moved == [[-0.25, 0.5, -0.5, 0.25, 0, 0][place] for place in places]


async def test_equal_rewards_of_peers_leave_exactly_nothing():
    played = [("proposer", 0.3), ("solver", 0.7)] * 3 + [("solver", 0.1)] * 6
    found = await credit(HierarchicalGrpo(["solver"]), played, [0] * 6 + [1] * 6)
    assert found[0::2][:3] == [0.0] * 3
    assert found[1:6:2] == [0.0] * 3
    assert found[6:] == [0.0] * 6


async def test_who_has_no_peer_has_no_credit_and_is_counted():
    algorithm = HierarchicalGrpo(["proposer"])
    assert await credit(algorithm, PLAYED, EPISODES) == [0, 0.25, -0.75, 0, 0.25, 0.25]
    assert await credit(algorithm, [("solver", 1)], [0]) == [0]
    assert algorithm.tally.take() == {"without_peers": 3}


async def test_an_unused_name_is_reported_once(caplog: pytest.LogCaptureFixture):
    algorithm = HierarchicalGrpo(["solver", "sovler"])
    with caplog.at_level(logging.WARNING):
        await credit(algorithm, PLAYED, EPISODES)
        await credit(algorithm, PLAYED, EPISODES)
    assert [record.getMessage() for record in caplog.records] == [
        "hierarchical_grpo: episode_agents has 'sovler', and the first group is of proposer, solver"
    ]
