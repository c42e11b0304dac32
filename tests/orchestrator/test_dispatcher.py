"""Every started episode arrives exactly once, whatever happens to it."""

import asyncio
import math

import pytest

from headrace.environments.base import Environment
from headrace.inference.client import EngineUnavailable
from headrace.orchestrator.dispatcher import Arrival, Dispatcher, EpisodeRunner
from headrace.orchestrator.scheduler import Episode, Kind
from headrace.rollout.types import Group, Rollout, Task, Turn

GOOD_TURN = Turn([1], [2], [-0.1], [0], 1.0)


class Scripted(Environment):
    """Does what the task says."""

    async def run(self, task, context):
        match task.data["do"]:
            case "succeed":
                return [Rollout(rewards={"a": 0.25, "b": 0.5}, turns=[GOOD_TURN])]
            case "raise":
                raise KeyError("answer")
            case "hang":
                return await asyncio.sleep(3600, [])
            case "lose the engine":
                raise EngineUnavailable("connection refused")
            case "return nothing":
                return []
            case "sample nothing":
                return [Rollout(rewards={"a": 1.0})]
            case "score nothing":
                return [Rollout(turns=[GOOD_TURN])]
            case "score nan":
                return [Rollout(rewards={"a": math.nan}, turns=[GOOD_TURN])]
        raise AssertionError(task.data)


async def outcome(do: str, timeout: float | None = None, cancel: str | None = None, started: bool = True) -> Rollout:
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), None, timeout)}, arrivals.put_nowait)
    episode = Episode(0, Kind.TRAIN, Group("g", Task("env", {"do": do}), 1, 0, draw_id=7), 0)
    dispatcher.start(episode)
    if started:
        await asyncio.sleep(0)
    if cancel is not None:
        dispatcher.cancel(episode, cancel)
    arrival = await asyncio.wait_for(arrivals.get(), 5)
    await dispatcher.close()
    assert arrivals.empty()
    (rollout,) = arrival.rollouts
    assert (rollout.env, rollout.group_id, rollout.draw_id) == ("env", "g", 7)
    return rollout


async def test_a_reward_is_the_sum_of_its_components():
    rollout = await outcome("succeed")
    assert rollout.error is None
    assert rollout.reward == 0.75


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("raise", "environment"),
        ("lose the engine", "engine"),
        ("return nothing", "empty"),
        ("sample nothing", "empty"),
        ("score nothing", "invalid_reward"),
        ("score nan", "invalid_reward"),
    ],
)
async def test_a_failure_arrives_as_a_rollout_that_names_its_reason(do: str, reason: str):
    rollout = await outcome(do)
    assert rollout.error is not None
    assert rollout.error.reason == reason


async def test_an_episode_past_its_time_limit_arrives_as_a_timeout():
    rollout = await outcome("hang", timeout=0.01)
    assert rollout.error is not None
    assert rollout.error.reason == "timeout"


async def test_a_cancelled_episode_arrives_with_the_reason_of_its_cancellation():
    rollout = await outcome("hang", cancel="off_policy")
    assert rollout.error is not None
    assert rollout.error.reason == "off_policy"


async def test_an_episode_cancelled_before_its_first_step_arrives_all_the_same():
    rollout = await outcome("hang", cancel="off_policy", started=False)
    assert rollout.error is not None
    assert rollout.error.reason == "off_policy"


async def test_cancelling_an_episode_whose_arrival_is_on_the_way_changes_nothing():
    arrivals: list[Arrival] = []
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), None, None)}, arrivals.append)
    episode = Episode(0, Kind.TRAIN, Group("g", Task("env", {"do": "succeed"}), 1, 0, draw_id=7), 0)
    dispatcher.start(episode)
    await asyncio.sleep(0.01)
    dispatcher.cancel(episode, "off_policy")
    await asyncio.sleep(0.01)
    assert [arrival.rollouts[0].error for arrival in arrivals] == [None]


async def test_an_algorithm_that_raises_on_a_rollout_is_named_as_such():
    async def process(rollout: Rollout) -> None:
        raise ZeroDivisionError("no tokens")

    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), None, None, process)}, arrivals.put_nowait)
    dispatcher.start(Episode(0, Kind.TRAIN, Group("g", Task("env", {"do": "succeed"}), 1, 0, draw_id=7), 0))
    (rollout,) = (await asyncio.wait_for(arrivals.get(), 5)).rollouts
    assert rollout.error is not None
    assert rollout.error.reason == "algorithm"
