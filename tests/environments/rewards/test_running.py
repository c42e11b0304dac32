"""Named rewards that score an answer together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.environments.base import EpisodeError
from headrace.environments.rewards import Exact, Pattern, Rewards, in_sandbox, scaled
from headrace.environments.rewards.base import Counts
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import HOSTILE
from tests.environments.sandbox_functions import NAME
from tests.refusals import refused

Data = Mapping[str, Any]


def length(text: str, data: Data) -> float:
    return float(len(text))


async def later(text: str, data: Data) -> float:
    await asyncio.sleep(0)
    return 0.5


class Closing:
    name = "closing"

    def __init__(self) -> None:
        self.closed = 0

    def __call__(self, text: str, data: Data) -> float:
        return 1.0

    async def close(self) -> None:
        self.closed += 1


async def test_every_reward_scores_under_its_name():
    rewards = Rewards({"exact": Exact(), "size": length, "later": later})
    assert await rewards.score("four", {"answer": "four"}) == {"exact": 1.0, "size": 4.0, "later": 0.5}


async def test_rewards_without_names_have_their_own():
    rewards = Rewards([Exact(), length, later, scaled(Closing(), 2.0)])
    assert await rewards.score("four", {"answer": "4"}) == {"exact": 0.0, "length": 4.0, "later": 0.5, "closing": 2.0}


async def test_no_rewards_score_nothing():
    assert await Rewards([]).score("text", {}) == {}


@pytest.mark.parametrize(
    ("rewards", "key"),
    [
        ([Exact(), Exact("other")], "rewards.exact"),
        ([lambda text, data: 1.0, lambda text, data: 0.0], "rewards.<lambda>"),
        ([type("Nameless", (), {"__call__": length})()], "rewards"),
        ({"size": 3}, "rewards.size"),
    ],
)
def test_a_table_that_cannot_work_is_refused(rewards: Any, key: str):
    with refused(key=key):
        Rewards(rewards)


@pytest.mark.parametrize(
    ("value", "score"), [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(False), 0.0)]
)
async def test_numbers_of_any_kind_are_numbers(value: Any, score: float):
    [found] = (await Rewards({"r": lambda text, data: value}).score("", {})).values()
    assert (found, type(found)) == (score, float)


@pytest.mark.parametrize("value", [None, "1.0", "x" * 1000, float("nan"), float("inf"), np.zeros(2), 10**400])
async def test_a_value_that_is_not_a_finite_number_fails_the_episode_and_names_the_reward(value: Any):
    async def give(text: str, data: Data) -> Any:
        return value

    with pytest.raises(EpisodeError, match="'mine'") as failure:
        await Rewards({"fine": length, "mine": give}).score("", {})
    assert failure.value.reason == "reward_no_number"
    assert len(str(failure.value)) < 200
    assert failure.value.remote_traceback == "", "the sentence says all; the frames would be ours"


def fail(text: str, data: Data) -> float:
    return float(data["no such field"])


def leave(text: str, data: Data) -> float:
    raise SystemExit("a checker that wants to end the program")


async def cancel_itself(text: str, data: Data) -> float:
    raise asyncio.CancelledError


async def time_out_by_itself(text: str, data: Data) -> float:
    raise TimeoutError("the database did not answer")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (fail, "KeyError: 'no such field'"),
        (leave, "SystemExit: a checker"),
        (cancel_itself, "CancelledError"),
        (time_out_by_itself, "TimeoutError: the database did not answer"),
    ],
)
async def test_a_reward_that_raises_fails_the_episode_with_the_place(reward: Any, words: str):
    with pytest.raises(EpisodeError, match=f"'mine'.*{words}") as failure:
        await Rewards({"mine": reward}).score("", {})
    assert failure.value.reason == "reward_failed"
    assert "test_running.py:" in failure.value.place
    assert reward.__name__ in failure.value.remote_traceback


async def test_an_episode_error_passes_as_it_is():
    error = EpisodeError("no_judge", "the judge is away")

    def judge(text: str, data: Data) -> float:
        raise error

    with pytest.raises(EpisodeError) as failure:
        await Rewards([judge]).score("", {})
    assert failure.value is error


async def test_a_reward_that_takes_too_long_fails_the_episode():
    async def never(text: str, data: Data) -> float:
        await asyncio.sleep(3600)
        return 1.0

    with pytest.raises(EpisodeError, match=r"'never'.*0\.05 s") as failure:
        await Rewards([length, never], timeout=0.05).score("", {})
    assert failure.value.reason == "reward_timeout"


async def test_a_reward_with_limits_of_its_own_may_stand_in_line():
    async def patient(text: str, data: Data) -> float:
        await asyncio.sleep(0.1)
        return 1.0

    patient.bounded = True  # type: ignore[attr-defined]
    assert await Rewards([patient], timeout=0.01).score("", {}) == {"patient": 1.0}


async def test_asynchronous_rewards_run_side_by_side():
    meeting = asyncio.Barrier(2)

    async def meet(text: str, data: Data) -> float:
        await meeting.wait()
        return 1.0

    assert await Rewards({"a": meet, "b": meet}).score("", {}) == {"a": 1.0, "b": 1.0}


async def test_cancelling_a_score_cancels_its_rewards():
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(text: str, data: Data) -> float:
        asked.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    scoring = asyncio.create_task(Rewards([wait]).score("", {}))
    await asked.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert cancelled.is_set()


async def test_closing_closes_those_that_can_be_closed():
    inner, outer = Closing(), Closing()
    await Rewards({"plain": length, "scaled": scaled(inner, 2.0), "own": outer}).close()
    assert (inner.closed, outer.closed) == (1, 1)


async def test_a_scaled_reward_counts_so_many_times():
    rewards = Rewards({"twice": scaled(length, 2.0), "half": scaled(later, -0.5)})
    assert await rewards.score("four", {}) == {"twice": 8.0, "half": -0.25}


async def test_a_users_function_runs_in_a_sandbox_and_is_killed_if_it_never_returns():
    rewards = Rewards([in_sandbox(f"{NAME}:length", 60.0, 1), in_sandbox(f"{NAME}:never", 0.3, 1)])
    with pytest.raises(EpisodeError, match=r"'never'.*:never.*0\.3 s") as failure:
        await rewards.score("four", {"most": 8})
    assert failure.value.reason == "reward_timeout"
    with pytest.raises(EpisodeError, match=r"'length'.*ZeroDivisionError") as failure:
        await rewards.score("four", {"most": 0})
    assert failure.value.reason == "reward_failed"
    assert "sandbox_functions.py" in failure.value.remote_traceback
    await rewards.close()


async def test_a_users_function_in_a_sandbox_takes_any_text():
    rewards = Rewards([in_sandbox(f"{NAME}:length", 60.0, 1)])
    for text in HOSTILE.values():
        assert await rewards.score(text, {"most": 2}) == {"length": len(text) / 2}
    await rewards.close()


def test_what_is_no_import_path_is_refused():
    with refused(key="function", value="check"):
        in_sandbox("check")


async def test_the_event_loop_stays_free_while_all_of_them_work():
    rewards = Rewards({"slow": Pattern("(a+)+$", timeout=0.3), "exact": Exact(), "later": later})
    scores, ticks = await ticks_during(rewards.score("a" * 40 + "!", {"answer": ""}))
    await rewards.close()
    assert scores == {"slow": 0.0, "exact": 0.0, "later": 0.5}
    assert ticks > 30


def test_what_a_reward_counts_is_logged_at_the_first_and_at_every_doubling(caplog: pytest.LogCaptureFixture):
    counts = Counts("code", timeouts="solutions that hang")
    for _ in range(9):
        counts.add("timeouts")
    assert counts == {"timeouts": 9}
    assert [record.message for record in caplog.records] == [
        f"reward 'code': solutions that hang: {count} so far in this process" for count in (1, 2, 4, 8)
    ]
