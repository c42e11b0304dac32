"""Every started episode arrives exactly once, whatever happens to it."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.environments.base import Environment, EpisodeError
from headrace.inference.client.errors import EngineUnavailable
from headrace.orchestrator.dispatcher import STARTS_PER_ITERATION, Dispatcher, EpisodeRunner
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn
from headrace.transport.rollout_files import write_rollouts
from tests.environments.worker_environments import ODD

GOOD_TURN = Turn([1], [2], [-0.1], [0], 1.0)


class NoModel:
    """Contexts without a model; counts the open ones."""

    def __init__(self) -> None:
        self.open_sessions: list[str] = []

    def open(self, session: str, episode: str):
        self.open_sessions.append(session)

    def close(self, session: str) -> None:
        self.open_sessions.remove(session)


class Scripted(Environment):
    """Behaves as its task demands."""

    async def run(self, task, context):
        match task.data["do"]:
            case "succeed":
                return [Rollout(rewards={"a": 0.25, "b": 0.5}, turns=[GOOD_TURN])]
            case "raise":
                raise KeyError("answer")
            case "hang":
                return await asyncio.sleep(3600, [])
            case "ignore cancellation":
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    return await asyncio.sleep(3600, [])
            case "fail for a reason":
                raise EpisodeError("sandbox", "no container left")
            case "lose the engine":
                raise EngineUnavailable("connection refused")
            case "return nothing":
                return []
            case "sample nothing":
                return [Rollout(rewards={"a": 1.0})]
            case "score nothing":
                return [Rollout(turns=[GOOD_TURN])]
            case "quote half a character":
                raise ValueError("unknown colour \ud800")
            case "name an odd reason":
                raise EpisodeError(404, "not found")
            case "cancel itself":
                raise asyncio.CancelledError
            case "return a rollout":
                return Rollout(rewards={"a": 1.0}, turns=[GOOD_TURN])
            case "return none":
                return None
            case "speak for another":
                return [Rollout(agent="user", trainable=False, rewards={"a": 0.0})]
            case "fail and mumble":
                return [Rollout(error=RolloutError("mine"), messages=[{"content": "\ud800"}], metrics={"m": "x"})]
            case "change its task":
                task.data["seen"] = task.data["list"].append(1) or "yes"
                return [Rollout(rewards={"a": float(len(task.data["list"]))}, turns=[GOOD_TURN])]
            case "score nan":
                return [Rollout(rewards={"a": math.nan}, turns=[GOOD_TURN])]
        raise AssertionError(task.data)


async def outcome(do: str, timeout: float | None = None, cancel: str | None = None, started: bool = True) -> Rollout:
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    contexts = NoModel()
    runner = EpisodeRunner(Scripted(), contexts, timeout)
    dispatcher = Dispatcher({("train", "env"): runner}, arrivals.put_nowait, grace_s=0.05)
    episode = Episode(0, Kind.TRAIN, Group("g", Task("env", {"do": do}), 4, 0, draw_id=7), index=3)
    dispatcher.start(episode)
    if started:
        await asyncio.sleep(0.01)
    if cancel is not None:
        dispatcher.cancel(episode, cancel)
    arrival = await asyncio.wait_for(arrivals.get(), 5)
    await dispatcher.close()
    assert arrivals.empty()
    assert contexts.open_sessions == [] or do == "ignore cancellation"
    (rollout,) = arrival.rollouts
    assert (rollout.env, rollout.group_id, rollout.draw_id, rollout.episode) == ("env", "g", 7, 3)
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
        ("fail for a reason", "sandbox"),
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


@pytest.mark.parametrize(
    ("do", "reason", "detail"),
    [
        ("quote half a character", "environment", r"ValueError: unknown colour \ud800"),
        ("name an odd reason", "404", "not found"),
        ("cancel itself", "environment", "CancelledError: the environment cancelled its own episode"),
        ("return a rollout", "environment", "TypeError: run() must return a list of Rollout, not a Rollout"),
        ("return none", "environment", "TypeError: run() must return a list of Rollout, not None"),
        ("fail and mumble", "mine", ""),
    ],
)
async def test_whatever_an_environment_says_can_be_recorded(do: str, reason: str, detail: str, tmp_path: Path):
    rollout = await outcome(do)
    assert rollout.error == RolloutError(reason, detail)
    write_rollouts(tmp_path, 1, [], [(rollout, reason)])


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, odd in ODD.items() for value in odd])
async def test_whatever_an_environment_returns_can_be_recorded(field: str, value: Any, tmp_path: Path):
    class Odd(Environment):
        async def run(self, task, context):
            rollout = Rollout(rewards={"a": 1.0}, turns=[GOOD_TURN])
            setattr(rollout, field, value)
            return [rollout]

    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Odd(), NoModel(), None)}, arrivals.put_nowait)
    dispatcher.start(Episode(0, Kind.TRAIN, Group("g", Task("env", {}), 1, 0), 0))
    (rollout,) = (await asyncio.wait_for(arrivals.get(), 5)).rollouts
    write_rollouts(tmp_path, 1, [], [(rollout, "any")])
    assert rollout.error is None or rollout.error.reason in ("invalid_reward", "invalid_rollout")


async def test_an_agent_that_is_not_trained_needs_no_tokens():
    rollout = await outcome("speak for another")
    assert rollout.error is None
    assert rollout.reward == 0.0


async def test_an_episode_may_change_its_task_without_others_noticing():
    arrivals: list[Arrival] = []
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), NoModel(), None)}, arrivals.append)
    group = Group("g", Task("env", {"do": "change its task", "list": []}, "own key"), 2, 0)
    for number in range(2):
        dispatcher.start(Episode(number, Kind.TRAIN, group, number))
    await asyncio.sleep(0.01)
    assert [arrival.rollouts[0].reward for arrival in arrivals] == [1.0, 1.0]
    assert [arrival.rollouts[0].task_key for arrival in arrivals] == ["own key"] * 2
    assert group.task.data == {"do": "change its task", "list": []}


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


async def test_an_episode_that_ignores_its_cancellation_is_left_behind_and_arrives_once(
    caplog: pytest.LogCaptureFixture,
):
    rollout = await outcome("ignore cancellation", cancel="off_policy")
    assert rollout.error is not None
    assert rollout.error.reason == "off_policy"
    (record,) = caplog.records
    assert record.args == ("env", "off_policy")


async def test_closing_ends_within_a_bounded_time_whatever_runs():
    arrivals: list[Arrival] = []
    runner = EpisodeRunner(Scripted(), NoModel(), None)
    dispatcher = Dispatcher({("train", "env"): runner}, arrivals.append, grace_s=0.05)
    for number, do in enumerate(["ignore cancellation", "hang", "hang"]):
        dispatcher.start(Episode(number, Kind.TRAIN, Group("g", Task("env", {"do": do}), 3, 0), number))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(dispatcher.close(), 5)
    assert [arrival.rollouts[0].error.reason for arrival in arrivals] == ["cancelled"] * 3


class Counting(Environment):
    """Counts the episodes that have begun."""

    begun = 0

    async def run(self, task, context):
        self.begun += 1
        return await asyncio.sleep(3600, [])


async def test_of_many_episodes_a_few_begin_at_a_time_and_those_cancelled_in_line_never_do():
    arrivals: list[Arrival] = []
    environment = Counting()
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(environment, NoModel(), None)}, arrivals.append)
    episodes = [Episode(n, Kind.TRAIN, Group("g", Task("env", {}), 1000, 0), n) for n in range(1000)]
    for episode in episodes:
        dispatcher.start(episode)
    for episode in episodes[500:]:
        dispatcher.cancel(episode, "off_policy")
    before, steps = 0, []
    while environment.begun < 500:
        await asyncio.sleep(0)
        steps.append(environment.begun - before)
        before = environment.begun
    assert max(steps) == STARTS_PER_ITERATION
    await dispatcher.close()
    assert environment.begun == 500
    assert len(arrivals) == 1000


async def test_failures_of_one_kind_are_logged_once_and_counted_each(caplog: pytest.LogCaptureFixture):
    arrivals: list[Arrival] = []
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), NoModel(), None)}, arrivals.append)
    script = ["raise", "raise", "score nan", "score nan", "lose the engine", "lose the engine", "return nothing"]
    for number, do in enumerate(script):
        dispatcher.start(Episode(number, Kind.TRAIN, Group("g", Task("env", {"do": do}), 7, 0), number))
    async with asyncio.timeout(10):
        while len(arrivals) < 7:
            await asyncio.sleep(0.001)
    reasons = [record.getMessage().split("failed (")[1].split(":")[0] for record in caplog.records]
    assert sorted(reasons) == ["empty", "engine", "environment", "invalid_reward"]
    assert "KeyError: 'answer'" in caplog.text


async def test_cancelling_an_episode_whose_arrival_is_on_the_way_changes_nothing():
    arrivals: list[Arrival] = []
    dispatcher = Dispatcher({("train", "env"): EpisodeRunner(Scripted(), NoModel(), None)}, arrivals.append)
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
    dispatcher = Dispatcher(
        {("train", "env"): EpisodeRunner(Scripted(), NoModel(), None, process)}, arrivals.put_nowait
    )
    dispatcher.start(Episode(0, Kind.TRAIN, Group("g", Task("env", {"do": "succeed"}), 1, 0, draw_id=7), 0))
    (rollout,) = (await asyncio.wait_for(arrivals.get(), 5)).rollouts
    assert rollout.error is not None
    assert rollout.error.reason == "algorithm"
