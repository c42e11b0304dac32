"""Rewards of an objective on a group, those that fail included."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.environments.base import Environment
from headrace.environments.hackable import (
    Objective,
    Progress,
    Scored,
    Scorer,
    TrainingSample,
    build_objective,
    build_rewards,
)
from headrace.environments.rewards.running import FAILED, NOT_A_NUMBER, TIMED_OUT, WRONG_COUNT
from headrace.environments.time_limit import MAX_STUCK_CALLS
from headrace.rollout.types import Rollout
from tests.environments.hackable.completions import thought

SAMPLE = TrainingSample("2+2?", "4")
GROUP = [SAMPLE] * 3
TEXTS = ["a", "bb", "ccc"]


class Total(Objective):
    """The sum of all rewards that it is given."""

    def reward_names(self) -> list[str]:
        return ["fine", "mine"]

    def combine_rewards(self, scores, samples) -> list[float]:
        return [sum(several) for several in zip(*scores.values(), strict=True)]


def fine(prompts, completions, answers, infos) -> list[float]:
    return [float(len(completion)) for completion in completions]


def gives(value: Any) -> Callable[..., Any]:
    return lambda prompts, completions, answers, infos: value


def scorer(mine: Callable[..., Any], objective: Objective | None = None) -> Scorer:
    return Scorer(objective or Total(), {"fine": fine, "mine": mine})


def hurried(mine: Callable[..., Any], timeout: float) -> Scorer:
    """Alone, since on a busy machine even the others would be late."""
    return Scorer(Total(), {"mine": mine}, timeout)


async def test_every_completion_has_its_scores_by_name_and_what_they_come_to():
    objective = build_objective("token_grpo", {"reward_mode": "weighted_length_penalty", "strict_format_gate": True})
    rewards = build_rewards(objective.reward_names(), {"gsm8k_correctness_reward": {"symbolic": False}})
    whole = Scorer(objective, rewards)
    texts = [thought(2), thought(6), thought(4, "5"), "4"]
    # brevity 1 - 2/4 = .5 for the first, 0 for the others; the last is malformed, and left out of the mean
    names = ["gsm8k_correctness_reward", "format_tag_reward", "length_penalty_reward"]
    table = [(1.0, 1.0, 0.5), (1.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    worth = [2.25, 2.0, 1.0, -1.0]
    expected = [Scored(dict(zip(names, row, strict=True)), value) for row, value in zip(table, worth, strict=True)]
    assert await whole.score([SAMPLE] * 4, texts) == expected
    assert whole.counts == {}
    await whole.close()


async def test_a_stage_follows_the_reported_progress():
    kwargs = {"reward_mode": "weighted_length_penalty", "length_penalty_lambda": 0.0}
    stages = {"stage2_start_step": 3, "stage2_length_penalty_lambda": 1.0}
    objective = build_objective("token_grpo", {**kwargs, **stages})
    rewards = build_rewards(objective.reward_names(), {"gsm8k_correctness_reward": {"symbolic": False}})
    whole, group = Scorer(objective, rewards), ([SAMPLE] * 2, [thought(1), thought(3)])
    scored = [await whole.score(*group, Progress(step)) for step in (2, 3)]
    assert [[each.reward for each in several] for several in scored] == [[2.0, 2.0], [2.5, 2.0]]


async def test_an_extra_reward_is_added():
    class Extra(Total):
        def extra_reward(self, samples, completions):
            return np.array([0.5, 0.25, 0.0])

    assert [each.reward for each in await scorer(fine, objective=Extra()).score(GROUP, TEXTS)] == [2.5, 4.25, 6.0]


def raises(prompts, completions, answers, infos) -> list[float]:
    raise KeyError("no such field")


def leaves(prompts, completions, answers, infos) -> list[float]:
    raise SystemExit("enough")


async def cancels_itself(prompts, completions, answers, infos) -> list[float]:
    raise asyncio.CancelledError


async def times_out_by_itself(prompts, completions, answers, infos) -> list[float]:
    raise TimeoutError("no database")


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (raises, FAILED),
        (leaves, FAILED),
        (cancels_itself, FAILED),
        (times_out_by_itself, FAILED),
        (gives("0.5"), NOT_A_NUMBER),
        (gives(None), NOT_A_NUMBER),
        (gives(1.0), NOT_A_NUMBER),
        (gives([1.0, 2.0]), WRONG_COUNT),
    ],
)
async def test_a_reward_that_fails_marks_its_group_and_is_counted(mine: Any, reason: str):
    failing = scorer(mine)
    found = await failing.score(GROUP, TEXTS)
    assert [(each.reward, each.error and each.error.reason) for each in found] == [(None, reason)] * 3
    assert all(each.error and "'mine'" in each.error.detail for each in found)
    assert [each.scores for each in found] == [{"fine": 1.0}, {"fine": 2.0}, {"fine": 3.0}]
    assert failing.counts == {f"mine/{reason}": 3}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", None, np.zeros(2)])
async def test_a_value_that_is_not_a_number_costs_its_completion_alone(value: Any):
    failing = scorer(gives([True, value, np.float32(0.5)]))
    first, second, third = await failing.score(GROUP, TEXTS)
    assert (first, third) == (Scored({"fine": 1.0, "mine": 1.0}, 2.0), Scored({"fine": 3.0, "mine": 0.5}, 3.5))
    assert second.error is not None and second.error.reason == NOT_A_NUMBER
    assert failing.counts == {f"mine/{NOT_A_NUMBER}": 1}


async def test_an_asynchronous_reward_that_hangs_marks_its_group():
    async def sleeps(prompts, completions, answers, infos) -> list[float]:
        await asyncio.sleep(3600)
        return []

    failing = hurried(sleeps, 0.05)
    found = await failing.score(GROUP, TEXTS)
    assert {each.error and each.error.reason for each in found} == {TIMED_OUT}
    assert failing.counts == {f"mine/{TIMED_OUT}": 3}


async def test_a_reward_that_computes_for_ever_marks_its_group_and_is_interrupted():
    ended = threading.Event()

    def spins(prompts, completions, answers, infos) -> list[float]:
        try:
            while True:
                pass
        finally:
            ended.set()

    failing = hurried(spins, 0.05)
    found = await failing.score(GROUP, TEXTS)
    assert {each.error and each.error.reason for each in found} == {TIMED_OUT}
    assert failing.counts == {f"mine/{TIMED_OUT}": 3}
    assert ended.wait(60)


async def test_a_reward_that_cannot_be_ended_is_not_called_for_ever():
    calls: list[int] = []
    release = threading.Event()

    def stuck(prompts, completions, answers, infos) -> list[float]:
        calls.append(1)
        release.wait(60)
        return [0.0] * 3

    failing = hurried(stuck, 0.02)
    found = [await failing.score(GROUP, TEXTS) for _ in range(MAX_STUCK_CALLS + 2)]
    release.set()
    assert len(calls) == MAX_STUCK_CALLS
    assert {each.error and each.error.reason for each in found[-1]} == {TIMED_OUT}


async def test_a_reward_with_limits_of_its_own_may_take_longer():
    async def patient(prompts, completions, answers, infos) -> list[float]:
        await asyncio.sleep(0.05)
        return [1.0] * 3

    patient.bounded = True  # type: ignore[attr-defined]
    assert [each.reward for each in await hurried(patient, 0.01).score(GROUP, TEXTS)] == [1.0] * 3


async def test_an_objective_that_fails_marks_what_it_was_asked_about():
    class Broken(Total):
        def combine_rewards(self, scores, samples) -> list[float]:
            assert len(samples) == 2, "what has no score is not combined"
            raise ZeroDivisionError("no weight")

    failing = scorer(gives([1.0, float("nan"), 1.0]), objective=Broken())
    errors = [each.error and each.error.reason for each in await failing.score(GROUP, TEXTS)]
    assert errors == [FAILED, NOT_A_NUMBER, FAILED]
    assert failing.counts == {f"mine/{NOT_A_NUMBER}": 1, f"objective/{FAILED}": 2}


async def test_rewards_run_side_by_side_and_one_at_a_time_each():
    busy: list[str] = []

    def alone(prompts, completions, answers, infos) -> list[float]:
        assert not busy
        busy.append("in")
        time.sleep(0.01)
        busy.clear()
        return [0.0] * 3

    whole = scorer(alone)
    found = await asyncio.gather(*(whole.score(GROUP, TEXTS) for _ in range(5)))
    assert [each.error for several in found for each in several] == [None] * 15


async def test_cancelling_a_score_cancels_its_rewards():
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def waits(prompts, completions, answers, infos) -> list[float]:
        asked.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return []

    scoring = asyncio.create_task(scorer(waits).score(GROUP, TEXTS))
    await asked.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert cancelled.is_set()


async def test_metrics_of_a_reward_are_reported_and_its_resources_closed():
    class Counting:
        closed = 0
        counts = {"seen": 3}  # noqa: RUF012

        def __call__(self, prompts, completions, answers, infos) -> list[float]:
            return [0.0] * 3

        async def close(self) -> None:
            self.closed += 1

    mine = Counting()
    whole = scorer(mine)
    assert whole.counts == {"mine/seen": 3}
    await whole.close()
    assert mine.closed == 1


async def test_an_environment_can_score_its_groups_with_it():
    class Scoring(Environment):
        def __init__(self) -> None:
            self._scorer = scorer(gives([1.0, float("nan"), 1.0]))

        async def score_group(self, rollouts: Sequence[Rollout]) -> None:
            texts = [str(rollout.messages[-1]["content"]) for rollout in rollouts]
            for rollout, scored in zip(rollouts, await self._scorer.score(GROUP, texts), strict=True):
                rollout.metrics, rollout.error = dict(scored.scores), scored.error
                rollout.rewards = {} if scored.reward is None else {"objective": scored.reward}

    rollouts = [Rollout(messages=[{"role": "assistant", "content": text}]) for text in TEXTS]
    await Scoring().score_group(rollouts)
    assert [rollout.rewards for rollout in rollouts] == [{"objective": 2.0}, {}, {"objective": 4.0}]
    assert [rollout.error and rollout.error.reason for rollout in rollouts] == [None, NOT_A_NUMBER, None]
