"""Scoring many sequences by a model that may be slow, dead, or fail at some of them."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.opd import Opd
from headrace.algorithms.teacher import MAX_FAILURES_IN_A_ROW, Job, Scorer
from headrace.inference.client.reference import ReferenceFailed
from headrace.rollout.types import Sample
from tests.algorithms.teachers import MODEL, SEQ_LEN, Teacher, host_of, opsd_of, pretended_logprobs, rlcsd_of, set_up

LONG = 50
"""Sequences from here on are too long for some teachers."""


def sample_of(length: int, first: int = 1, temperature: float = 1.0) -> Sample:
    """A prompt of one token, the rest sampled."""
    mask = np.arange(length) > 0
    return Sample(np.arange(first, first + length), mask, np.zeros(length), np.zeros(length), 1, temperature)


def jobs_of(*lengths: int) -> list[Job]:
    return [([first], sample_of(length, first)) for first, length in enumerate(lengths)]


def failed(outcomes: Sequence[object]) -> list[bool]:
    return [isinstance(outcome, ReferenceFailed) for outcome in outcomes]


async def reach(condition: Callable[[], bool]) -> None:
    """Let the others run until it holds; the test's own limit is the deadline."""
    while not condition():
        await asyncio.sleep(0)


class Gated(Teacher):
    """A teacher that answers no request before its gate opens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = asyncio.Event()

    async def work(self, token_ids: Sequence[int]) -> None:
        await self.gate.wait()
        await super().work(token_ids)


async def test_each_job_gets_the_scores_of_its_own_tokens_in_the_order_asked():
    jobs = [([9] * prompt, sample_of(length, prompt, 0.7)) for prompt, length in ((0, 5), (7, 2), (3, 9), (1, 1))]
    outcomes = await Scorer(Teacher()).score(jobs)
    for (prompt, sample), scores in zip(jobs, outcomes, strict=True):
        assert isinstance(scores, np.ndarray) and scores.dtype == np.float64
        completion = sample.token_ids[sample.prompt_length :].tolist()
        whole = pretended_logprobs([*prompt, *completion], 0.7)
        assert scores[sample.prompt_length :].tolist() == whole[len(prompt) :].tolist()
        assert len(scores) == len(sample)


async def test_nothing_to_score_is_nothing_asked():
    teacher = Teacher()
    assert await Scorer(teacher).score([]) == []
    assert teacher.asked == []


async def test_as_many_as_allowed_are_under_way_and_no_more():
    teacher = Gated()
    scoring = asyncio.create_task(Scorer(teacher, 4).score(jobs_of(*range(1, 30))))
    await reach(lambda: teacher.under_way == 4)
    teacher.gate.set()
    assert not any(failed(await scoring))
    assert teacher.most_under_way == 4


async def test_a_dead_model_is_asked_a_few_times_and_the_rest_fails_for_the_same_reason():
    teacher = Teacher(fails=lambda token_ids: True)
    outcomes = await Scorer(teacher, 1).score(jobs_of(*[5] * 100))
    assert len(teacher.asked) == MAX_FAILURES_IN_A_ROW
    assert {str(outcome) for outcome in outcomes} == {"the teacher did not score 5 tokens"}


async def test_a_hang_costs_the_time_of_one_request():
    teacher = Gated(fails=lambda token_ids: True)  # those that are under way run out of time together
    scoring = asyncio.create_task(Scorer(teacher, 8).score(jobs_of(*[5] * 100)))
    await reach(lambda: teacher.under_way == 8)
    teacher.gate.set()
    assert all(failed(await scoring))
    assert len(teacher.asked) == 8


async def test_the_next_batch_is_tried_again():
    teacher = Teacher(fails=lambda token_ids: len(teacher.asked) <= MAX_FAILURES_IN_A_ROW)
    scorer = Scorer(teacher, 1)
    assert all(failed(await scorer.score(jobs_of(*[5] * 10))))
    assert not any(failed(await scorer.score(jobs_of(*[5] * 10))))


@pytest.mark.parametrize("max_concurrent", [1, 2, 32])
async def test_sequences_that_are_too_long_do_not_cost_the_others_their_scores(max_concurrent: int):
    teacher = Teacher(fails=lambda token_ids: len(token_ids) >= LONG)
    lengths = [*[LONG + 1] * 20, *range(1, 20), *[LONG] * 20]
    outcomes = await Scorer(teacher, max_concurrent).score(jobs_of(*lengths))
    assert failed(outcomes) == [length >= LONG for length in lengths]


async def test_what_a_model_sometimes_fails_at_leaves_the_rest():
    teacher = Teacher(fails=lambda token_ids: token_ids[0] % 2 == 1)
    outcomes = await Scorer(teacher, 1).score(jobs_of(*[5] * 20))
    assert failed(outcomes) == [False, True] * 10


async def test_a_success_that_was_under_way_gives_a_failing_model_another_chance():
    class Uneven(Gated):
        async def work(self, token_ids: Sequence[int]) -> None:
            if token_ids[0] == 0:  # the slow one
                await self.gate.wait()
            elif len(self.asked) <= 2 * MAX_FAILURES_IN_A_ROW:
                raise ReferenceFailed("busy")

    teacher = Uneven()
    scoring = asyncio.create_task(Scorer(teacher, 2).score(jobs_of(*[5] * 20)))
    await reach(lambda: len(teacher.asked) == 1 + MAX_FAILURES_IN_A_ROW and teacher.under_way == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(teacher.asked) == 1 + MAX_FAILURES_IN_A_ROW  # it waits for the slow one
    teacher.gate.set()
    outcomes = await scoring
    assert len(teacher.asked) == 20
    assert sum(failed(outcomes)) == 2 * MAX_FAILURES_IN_A_ROW - 1


@pytest.mark.parametrize("scores", [[0.0, -1.0], [0.0, float("nan"), -1.0], [0.0, float("-inf"), -1.0]])
async def test_scores_that_are_too_few_or_no_numbers_are_a_failure(scores: list[float]):
    [outcome] = await Scorer(Teacher(lambda token_ids, temperature: scores)).score(jobs_of(3))
    assert isinstance(outcome, ReferenceFailed)
    assert re.search(r"\b2\b.*\b3\b", str(outcome))


async def test_a_cancelled_call_leaves_nothing_under_way():
    teacher = Gated()
    scoring = asyncio.create_task(Scorer(teacher, 4).score(jobs_of(*[5] * 20)))
    await reach(lambda: teacher.under_way == 4)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert (teacher.under_way, len(teacher.asked)) == (0, 4)


async def test_an_error_that_is_no_failure_of_the_model_comes_through_and_leaves_nothing_under_way():
    class Broken(Gated):
        async def work(self, token_ids: Sequence[int]) -> None:
            if token_ids[0] == 2:
                raise KeyError("a mistake of ours")
            await super().work(token_ids)

    teacher = Broken()
    with pytest.raises(KeyError, match="a mistake of ours"):
        await Scorer(teacher, 4).score(jobs_of(*[5] * 20))
    assert teacher.under_way == 0


async def test_the_teacher_or_else_the_policy_is_asked_whether_it_can_score():
    policy, teacher = Teacher(), Teacher()
    for algorithm in (opsd_of(), opsd_of(teacher)):
        host = host_of(policy)
        host.temperature = 0.7
        await algorithm.start(host)
    assert policy.checked == teacher.checked == (MODEL.tokenizer, SEQ_LEN, 0.7)


@pytest.mark.parametrize(("room", "warned"), [(None, False), (2256, False), (2255, True)])
async def test_too_little_room_for_hints_is_reported_with_its_cost_and_the_key_to_set(
    room: int | None, warned: bool, caplog: pytest.LogCaptureFixture
):
    teacher = Teacher()
    teacher.room = room
    await set_up(opsd_of(teacher))
    assert caplog.messages == [
        "env: the teacher takes at most 2255 tokens, and a hint with its sample may have 2256: rollouts with longer "
        "ones are dropped; serve it with max_model_len = 2256, unless hints are that much shorter"
    ] * int(warned)


@pytest.mark.parametrize(
    ("make", "cost"), [(Opd, ""), (opsd_of, "longer ones are dropped"), (rlcsd_of, "with their plain credit")]
)
async def test_what_puts_hints_before_samples_asks_for_their_room(
    make: Any, cost: str, caplog: pytest.LogCaptureFixture
):
    teacher = Teacher()
    teacher.room = SEQ_LEN + 1  # of 2 * 1000 + 256
    await set_up(make(teacher))
    warnings = [words for words in caplog.messages if "may have 2256" in words]
    assert [cost in words for words in warnings] == [True] * bool(cost)
