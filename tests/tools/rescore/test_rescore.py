"""Credit over again: what another algorithm gives to rollouts that had been credited before."""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.grpo import Grpo
from headrace.algorithms.length_penalties import LinearPenaltyConfig
from headrace.algorithms.max_rl import MaxRl
from headrace.algorithms.opd import Opd
from headrace.errors import BadInput
from headrace.orchestrator.filters import has_no_advantage
from headrace.rollout.types import Rollout
from headrace.tools.rescore.credit import Member, Rescored, RescoreFailed, rescore, uncredited
from tests.algorithms.groups import TASK, make_group
from tests.algorithms.teachers import Teacher, set_up


class Repeats(Algorithm):
    """The reward of the group before, and a complaint if credit is already there."""

    def __init__(self) -> None:
        self.last = 0.0

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for view in group:
            assert all(not sample.streams for sample in view.samples)
            view.assign_advantages(self.last)
        self.last = group[0].reward


class Fails(Algorithm):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def score_batch(self, batch: Sequence[RolloutView]) -> None:
        raise self.error


async def saved(
    rewards: Sequence[float], lengths: int | Sequence[int] = 2, algorithm: Algorithm | None = None
) -> list[Member]:
    """A group as a run leaves it, without what has no advantage."""
    group = make_group(rewards, lengths)
    await (algorithm or Grpo()).score_group(group)
    return [Member(view.rollout, TASK, not has_no_advantage(view.rollout)) for view in group]


async def again(members: Sequence[Member], algorithm: Algorithm) -> list[Rescored]:
    return await rescore([members], algorithm, drop_without_advantage=True)


def credit(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(rollout.samples[-1].streams["advantages"][-1]) for rollout in rollouts]


async def test_max_rl_divides_by_the_mean_what_grpo_left():
    found = await again(await saved([1, 0, 0, 0]), MaxRl())
    assert credit([entry.then for entry in found]) == [0.75, -0.25, -0.25, -0.25]
    assert credit([entry.now for entry in found]) == [3, -1, -1, -1]
    assert all(entry.trained and entry.trains for entry in found)


async def test_a_linear_penalty_makes_of_the_worked_group_what_it_should():
    penalized = Grpo(GroupCredit(penalty=LinearPenaltyConfig(coef=0.25).make(1000)))
    found = await again(await saved([1, 1, 0, 0], [100, 200, 100, 200]), penalized)
    assert credit([entry.then for entry in found]) == [0.5, 0.5, -0.5, -0.5]
    assert credit([entry.now for entry in found]) == pytest.approx([0.50625, 0.49375, -0.49375, -0.50625])


async def test_a_solved_group_without_a_signal_has_one_under_a_penalty():
    # p = .25 * 1 * [100, 300] / 1000 = [.025, .075], whose mean is .05
    members = await saved([1, 1], [100, 300])
    assert not any(member.trained for member in members)
    found = await again(members, Grpo(GroupCredit(penalty=LinearPenaltyConfig(coef=0.25).make(1000))))
    assert credit([entry.now for entry in found]) == pytest.approx([0.025, -0.025])
    assert all(entry.trains for entry in found)


async def test_the_same_algorithm_gives_the_same_again():
    found = await again(await saved([1, 0.5, 0, 0.25]), Grpo())
    for entry in found:
        np.testing.assert_array_equal(
            entry.then.samples[0].streams["advantages"], entry.now.samples[0].streams["advantages"]
        )


async def test_what_a_filter_took_still_counts_in_its_group_and_trains_on_neither_side():
    members = await saved([1, 0, 0, 0])
    members[3].trained, members[3].excluded = False, True
    found = await again(members, MaxRl())
    assert credit([entry.now for entry in found]) == [3, -1, -1, -1]
    assert [entry.trains for entry in found] == [True, True, True, False]


async def test_a_run_that_ships_zero_advantages_keeps_shipping_them():
    (one, two) = await rescore([await saved([1, 1])], MaxRl(), drop_without_advantage=False)
    assert one.trains and two.trains


async def test_an_algorithm_sees_no_credit_and_groups_in_their_order():
    groups = [await saved([reward, reward], algorithm=MaxRl()) for reward in (1.0, 0.5, 0.25)]
    found = await rescore(groups, Repeats(), drop_without_advantage=True)
    assert credit([entry.now for entry in found]) == [0, 0, 1, 1, 0.5, 0.5]
    assert all("advantages" in member.rollout.samples[0].streams for group in groups for member in group)


def test_what_merging_made_is_no_credit():
    (view,) = make_group([1.0])
    view.samples[0].set_stream("truncated_logprobs", [0.0, -0.5, -0.5])
    view.samples[0].set_stream("surprise", [1.0, 2.0, 3.0])
    assert list(uncredited(view.rollout).samples[0].streams) == ["truncated_logprobs"]


async def test_a_distilled_rollout_trains_by_its_reference_alone():
    found = await again(await saved([1, 1]), await set_up(Opd(Teacher())))
    for entry in found:
        streams = entry.now.samples[0].streams
        assert streams["ref_kl_weights"].tolist() == [0, 1, 1]
        assert streams["rl_weights"].tolist() == [0, 0, 0]
        assert streams.keys() == {"ref_kl_weights", "rl_weights", "ref_logprobs"}
        assert not entry.trained  # it had no advantage
        assert entry.trains


async def test_rollouts_that_the_teacher_does_not_score_are_dropped_with_the_reason():
    found = await again(await saved([1, 0]), await set_up(Opd(Teacher(fails=lambda ids: True))))
    assert not any(entry.trains for entry in found)
    assert {entry.drop for entry in found} == {"no_reference: the teacher did not score 3 tokens"}


async def test_an_algorithm_that_fails_is_named_with_what_it_failed_on():
    with pytest.raises(RescoreFailed, match="Fails failed on a batch of env: KeyError: 'hint'"):
        await again(await saved([1, 0]), Fails(KeyError("hint")))
    with pytest.raises(BadInput, match="no such teacher"):  # what explains itself stays as it is
        await again(await saved([1, 0]), Fails(BadInput("no such teacher")))
    no_credit = Repeats()
    no_credit.last = "nothing"
    with pytest.raises(RescoreFailed, match=r"Repeats failed on group group-0 \(task task-0 of env\): ValueError"):
        await again(await saved([1, 0]), no_credit)
