"""What an algorithm sees of a rollout, and how it writes credit."""

import math
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView, Survivor
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Rollout, Turn
from tests.algorithms.groups import TASK


def view(*completions: list[int]) -> RolloutView:
    """One sample per completion: their prompts share no prefix."""
    turns = [Turn([100 + n], ids, [-1.0] * len(ids), [0] * len(ids), 1.0) for n, ids in enumerate(completions)]
    return RolloutView(Rollout(group_id="g", reward=1.0, turns=turns, samples=merge_turns(turns)), TASK)


def credit(member: RolloutView) -> list[list[float]]:
    return [sample.streams["advantages"].tolist() for sample in member.samples]


def test_a_view_shows_the_rollout_and_its_task():
    member = view([1, 2], [3])
    assert (member.reward, member.group_id, member.completion_length) == (1.0, "g", 3)
    assert member.task is TASK


def test_a_scalar_is_broadcast_over_completions_and_prompts_get_zero():
    member = view([1, 2], [3])
    member.assign_advantages(0.5)
    assert credit(member) == [[0, 0.5, 0.5], [0, 0.5]]


def test_per_token_credit_is_sliced_across_samples_in_order():
    member = view([1, 2], [3])
    member.assign_advantages(np.array([0.25, 0.5, 0.75]))
    assert credit(member) == [[0, 0.25, 0.5], [0, 0.75]]


def test_per_token_credit_covers_observations_between_completions():
    turns = [Turn([9], [1], [-1.0], [0], 1.0), Turn([9, 1, 7, 7], [2], [-1.0], [0], 1.0)]
    member = RolloutView(Rollout(reward=1.0, turns=turns, samples=merge_turns(turns)), TASK)
    assert member.completion_length == 4
    member.assign_advantages([1, 2, 3, 4])
    assert credit(member) == [[0, 1, 2, 3, 4]]


def test_credit_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"\b2\b.*\b3\b"):
        view([1, 2], [3]).assign_advantages([0.1, 0.2])


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), np.int64(2), True])
def test_any_kind_of_number_is_a_scalar(number: Any):
    member = view([1, 2])
    member.assign_advantages(number)
    assert credit(member) == [[0, float(number), float(number)]]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e39, np.float32("nan")])
def test_credit_that_is_no_finite_float32_is_refused_with_its_task(number: Any):
    member = view([1, 2], [3])
    member.rollout.task_key = "task-7"
    for credit in (number, [0.5, number, 0.5]):
        with pytest.raises(ValueError, match="task-7"):
            member.assign_advantages(credit)
    member.assign_advantages(float(np.finfo(np.float32).max))


def test_a_survivor_is_dropped_with_a_reason():
    survivor = Survivor(view([1]).rollout, TASK)
    assert survivor.drop_reason == ""
    survivor.drop("no_teacher", "it did not answer")
    assert (survivor.drop_reason, survivor.drop_detail) == ("no_teacher", "it did not answer")
