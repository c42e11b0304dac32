"""On-policy distillation: reference logprobs by a frozen teacher."""

import logging
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.opd import Opd
from headrace.rollout.routing import route_actions
from tests.algorithms.teachers import MODEL, SEQ_LEN, Teacher, pretended_logprobs, rollout_of, set_up, survivors


async def test_every_sample_gets_the_teachers_logprobs_of_its_own_tokens():
    teacher = Teacher()
    algorithm = await set_up(Opd(teacher))
    batch = survivors([rollout_of([1, 2], [3], temperature=0.5), rollout_of([4, 5], [6, 7], one_sample=True)])
    await algorithm.score_batch(batch)
    for view in batch:
        assert not view.drop_reason
        for sample in view.samples:
            expected = pretended_logprobs(sample.token_ids, sample.temperature).astype(np.float32)
            assert sample.streams["ref_logprobs"].tolist() == expected.tolist()
            assert "advantages" not in sample.streams
    assert sorted(len(token_ids) for token_ids, _ in teacher.asked) == [2, 3, 6]
    assert algorithm.tally.take() == {"prefills": 3, "failures": 0}


async def test_sampled_tokens_go_to_ref_kl():
    algorithm = await set_up(Opd(Teacher()))
    [view] = survivors([rollout_of([1, 2], [3], one_sample=True)])
    await algorithm.score_batch([view])
    route_actions(view.samples[0], algorithm.action_loss_type)
    assert view.samples[0].streams["ref_kl_weights"].tolist() == [0, 1, 1, 0, 1]
    assert view.samples[0].streams["rl_weights"].tolist() == [0] * 5


async def test_a_rollout_that_lacks_any_scores_is_dropped_and_the_others_are_not(caplog: Any):
    algorithm = await set_up(Opd(Teacher(fails=lambda token_ids: token_ids[-1] == 66)))
    batch = survivors([rollout_of([1], [2]), rollout_of([3], [66]), rollout_of([4])])
    with caplog.at_level(logging.WARNING):
        await algorithm.score_batch(batch)
    assert [view.drop_reason for view in batch] == ["", "no_reference", ""]
    assert batch[1].drop_detail == "the teacher did not score 2 tokens"
    assert algorithm.tally.take() == {"prefills": 4, "failures": 1}
    assert caplog.records == []  # the caller that drops them logs it


async def test_a_dead_teacher_drops_the_batch_and_raises_nothing(caplog: Any):
    teacher = Teacher(fails=lambda token_ids: True)
    algorithm = await set_up(Opd(teacher, max_concurrent=4))
    batch = survivors([rollout_of([n]) for n in range(40)])
    await algorithm.score_batch(batch)
    assert {view.drop_reason for view in batch} == {"no_reference"}
    assert len(teacher.asked) == teacher.most_under_way == 4
    assert algorithm.tally.take() == {"prefills": 0, "failures": 40}
    assert [record for record in caplog.records if record.name.startswith("headrace")] == []


async def test_its_teacher_is_asked_first_whether_it_can_and_closed_in_the_end():
    policy, teacher = Teacher(), Teacher()
    algorithm = await set_up(Opd(teacher), policy)
    assert teacher.checked == (MODEL.tokenizer, SEQ_LEN, 1.0)
    assert policy.checked is None
    await algorithm.stop()
    assert (teacher.closed, policy.closed) == (True, False)


async def test_an_empty_batch_is_no_trouble():
    algorithm = await set_up(Opd(Teacher()))
    await algorithm.score_batch([])
    assert algorithm.tally.take() == {"prefills": 0, "failures": 0}


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
async def test_rewards_are_never_read(hook: str):
    algorithm = await set_up(Opd(Teacher()))
    batch = survivors([rollout_of([1], reward=float("nan"))])
    await getattr(algorithm, hook)(batch[0] if hook == "score_rollout" else batch)
    assert batch[0].samples[0].streams == {}
