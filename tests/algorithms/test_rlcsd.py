"""RLCSD: group credit, modulated by a contrast of hints (spec, "rlcsd"; arXiv 2606.11709)."""

import asyncio
import copy
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.algorithms import rlcsd
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.hints import response_text
from headrace.algorithms.length_penalties import OverlongPenaltyConfig
from headrace.algorithms.rlcsd import BATCHES_WITHOUT_CONTRAST, Rlcsd
from headrace.rollout.credit import fold, modulate
from headrace.rollout.types import Rollout
from headrace.tools.check_algorithm.fixtures import algorithm_config
from tests.algorithms.teachers import (
    MODEL,
    Teacher,
    hint_ids,
    pretended_logprobs,
    rlcsd_of,
    rollout_of,
    set_up,
    survivors,
)
from tests.refusals import refused

PLAIN = "{response}"
RIGHT, WRONG = 1.0, 0.0


def hint_teacher(*logprobs: Sequence[float], by: dict[str, int]) -> Teacher:
    """Return a teacher whose scores of the last tokens depend on the hint: `by` maps a hint to its row."""

    def score(token_ids: Sequence[int], temperature: float) -> np.ndarray:
        text = MODEL.decode(token_ids)
        [row] = [logprobs[row] for hint, row in by.items() if hint in text]
        return np.array([-7.0] * (len(token_ids) - len(row)) + list(row))

    return Teacher(score)


def with_credit(rollout: Rollout, advantage: float) -> Rollout:
    survivors([rollout])[0].assign_advantages(advantage)
    return rollout


def credit(rollout: Rollout) -> list[float]:
    return [float(a) for sample in rollout.samples for a in sample.streams["advantages"][sample.mask]]


def group_of(rewards: Sequence[float], name: str = "group-0", length: int = 3) -> list[Rollout]:
    """Each says something of its own, in tokens of its own."""
    return [
        rollout_of([10 + number] * length, reward=reward, said=f"reply {number} of {name}", group=name)
        for number, reward in enumerate(rewards)
    ]


async def processed(algorithm: Rlcsd, *groups: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of some groups, credited and then shipped in one batch."""
    for group in groups:
        await algorithm.score_group(survivors(group))
    rollouts = [rollout for group in groups for rollout in group]
    await algorithm.score_batch(survivors(rollouts))
    return rollouts


async def test_base_credit_is_standardized_over_the_group():
    algorithm = await set_up(rlcsd_of())
    group = group_of([1, 1, 0, 0])
    await algorithm.score_group(survivors(group))
    # mean .5, population deviation .5
    assert [credit(rollout)[0] for rollout in group] == pytest.approx([1, 1, -1, -1], abs=1e-5)
    equal = group_of([0.3] * 6)
    await algorithm.score_group(survivors(equal))
    assert all(credit(rollout) == [0, 0, 0] for rollout in equal)


async def test_penalty_and_terms_are_centered_beside_the_standardized_reward():
    def bonus(group: Sequence[Any]) -> list[float]:
        return [0.5, 0.0, 0.0, 0.5]

    credited = GroupCredit(
        normalize="std", penalty=OverlongPenaltyConfig(max_tokens=3, cache_tokens=2).make(1), terms=[bonus]
    )
    algorithm = await set_up(rlcsd_of(credit=credited))
    group = [*group_of([1, 1], length=3), *group_of([0, 0], length=2)]
    await algorithm.score_group(survivors(group))
    # p = 1, 1, .5, .5, centered .25; the bonus centered .25: neither is divided by the deviation of .5
    assert [credit(rollout)[0] for rollout in group] == pytest.approx([1, 0.5, -1, -0.5], abs=1e-5)


async def test_the_worked_example_of_the_spec():
    rows = [-0.1, -1.0, -0.5], [-0.1, -1.02, -1.0], [-0.2, -0.98, -2.0]
    teacher = hint_teacher(*rows, by={"the good one": 0, "a bad one": 1, "a worse one": 2, "mine": 1})
    algorithm = await set_up(rlcsd_of(teacher))
    own = with_credit(rollout_of([1, 2, 3], reward=0.5, said="mine"), -0.4)
    others = [
        with_credit(rollout_of([4, 5, 6 + number], reward=reward, said=said), 0.0)
        for number, (reward, said) in enumerate([(1.0, "the good one"), (0.0, "a bad one"), (0.3, "a worse one")])
    ]
    await algorithm.score_batch(survivors([own, *others]))
    assert credit(own) == pytest.approx([0.0, -1.2, 0.0])
    assert algorithm.tally.take()["largest_multiplier"] == 3.0


def siblings_asked(teacher: Teacher, own: Rollout) -> list[str]:
    """What was said before a rollout's tokens, in the order asked."""
    tail = own.samples[0].token_ids.tolist()
    hints = [MODEL.decode(ids[: -len(tail)]) for ids, _ in teacher.asked if ids[-len(tail) :] == tail]
    return [hint.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n") for hint in hints]


async def test_hints_are_one_correct_and_up_to_four_incorrect_siblings():
    policy = Teacher()
    algorithm = await set_up(rlcsd_of(template=PLAIN), policy)
    group = group_of([RIGHT, RIGHT, RIGHT, *[WRONG] * 6])
    await processed(algorithm, group)
    texts = {response_text(rollout): rollout for rollout in group}
    for own in group:
        hints = [texts[text] for text in siblings_asked(policy, own)]
        assert own not in hints
        assert sorted(hint.reward for hint in hints) == [WRONG] * 4 + [RIGHT]
        assert len({id(hint) for hint in hints}) == 5
    assert algorithm.tally.take()["prefills"] == 9 * 5


async def test_other_groups_and_other_agents_are_no_siblings():
    policy = Teacher()
    algorithm = await set_up(rlcsd_of(), policy)
    right, wrong = group_of([RIGHT, WRONG])
    right.agent = "another"
    elsewhere = group_of([RIGHT, WRONG], "group-1")[:1]
    await processed(algorithm, [right, wrong], elsewhere)
    assert policy.asked == []
    assert algorithm.tally.take()["no_contrast"] == 3


async def test_pools_depend_on_the_reward_alone():
    # correct from .8 on, incorrect below .8 - .3
    policy = Teacher()
    options = {"correct_threshold": 0.8, "min_contrast_gap": 0.3, "template": PLAIN}
    algorithm = await set_up(rlcsd_of(**options), policy)
    group = group_of([0.6, 0.8, 0.5, 0.49])
    await processed(algorithm, group)
    assert siblings_asked(policy, group[0]) == ["reply 1 of group-0", "reply 3 of group-0"]
    assert algorithm.tally.take()["no_contrast"] == 2  # the only correct one and the only incorrect one


async def test_a_filter_narrows_the_pools():
    policy = Teacher()
    algorithm = await set_up(
        rlcsd_of(template=PLAIN, hint_filter=lambda rollout: "4" not in response_text(rollout)), policy
    )
    group = group_of([RIGHT, WRONG, WRONG, WRONG, WRONG])
    await processed(algorithm, group)
    assert sorted(siblings_asked(policy, group[1])) == [
        "reply 0 of group-0",
        "reply 2 of group-0",
        "reply 3 of group-0",
    ]
    assert len(siblings_asked(policy, group[4])) == 4  # it may not be a hint, and has hints all the same


async def test_credit_is_moved_by_what_the_hints_say_of_the_rollouts_own_tokens():
    policy = Teacher()
    algorithm = await set_up(rlcsd_of(template=PLAIN, tau=0.3), policy)
    group = group_of([RIGHT, WRONG, RIGHT])
    before = copy.deepcopy(group)
    await algorithm.score_group(survivors(before))
    await processed(algorithm, group)
    # the first rollout: its correct sibling is the third, its incorrect one the second
    own = group[0].samples[0].token_ids.tolist()
    scores = [
        pretended_logprobs([*hint, *own])[len(hint) + 1 :] for hint in map(hint_ids, map(response_text, group[:0:-1]))
    ]
    moved, modulated = modulate(np.array(credit(before[0])), scores[0] - scores[1], 0.5, 0.3, 0.02)
    assert credit(group[0]) == pytest.approx(fold(moved, modulated, 1.0)[0].tolist(), rel=1e-6)
    assert credit(group[0]) != credit(before[0])


async def test_without_contrast_credit_stays_plain_and_is_counted():
    policy = Teacher()
    algorithm = await set_up(rlcsd_of(), policy)
    one_right = group_of([RIGHT, WRONG, WRONG])  # the right one has no correct sibling
    none_right = group_of([0.5, WRONG, WRONG], "group-1")
    await processed(algorithm, one_right, none_right)
    assert credit(one_right[0]) == pytest.approx([math.sqrt(2)] * 3, abs=1e-5)
    assert credit(none_right[0]) == pytest.approx([math.sqrt(2)] * 3, abs=1e-5)
    tally = algorithm.tally.take()
    assert (tally["no_contrast"], tally["contrast_available"]) == (4, pytest.approx(2 / 6))
    assert tally["prefills"] == 2 * 2


async def test_batches_without_any_contrast_are_logged_and_warned_about_after_several_in_a_row(caplog: Any):
    algorithm, notices = await set_up(rlcsd_of(), Teacher()), []
    algorithm.host.notify = notices.append
    caplog.set_level("INFO")
    for batch in range(BATCHES_WITHOUT_CONTRAST - 1):
        await processed(algorithm, group_of([0.5, WRONG], f"group-{batch}"))
    await processed(algorithm, group_of([RIGHT, WRONG, RIGHT], "a"), group_of([0.5, WRONG], "b"))
    assert "1 of 2 groups had a contrast" in caplog.messages[-1] and not notices
    for batch in range(BATCHES_WITHOUT_CONTRAST):
        assert not notices
        await processed(algorithm, group_of([0.5, WRONG], f"later-{batch}"))
    assert len(notices) == 1 and "algo.correct_threshold" in notices[0]


async def test_what_is_logged():
    # four tokens each; the second half is where the hints disagree
    teacher = hint_teacher(
        [-1, -1, -1, -1], [-1, -1, -2, -2], by={"reply 0": 0, "reply 2": 0, "reply 1": 1, "reply 3": 1}
    )
    algorithm = await set_up(rlcsd_of(teacher))
    group = group_of([RIGHT, WRONG, RIGHT, WRONG], length=4)
    await processed(algorithm, group, group_of([RIGHT, RIGHT], "group-1", length=4))
    assert algorithm.tally.take() == {
        "modulated_fraction": 8 / 24,
        "contrast_available": 4 / 6,
        "no_contrast": 2,
        "prefills": 2 * 3 + 2 * 2,  # the right ones have two incorrect siblings, the wrong ones one
        "largest_multiplier": 2.0,
        "teacher_failed": 0,
        "hints_apart": 4,  # prompts of one made-up token
    }


async def test_both_normalizations_by_hand_for_rollouts_of_different_lengths():
    # x is .5 on the first token of each (e is 1, far above tau), 0 on the rest
    def score(token_ids: Sequence[int], temperature: float) -> np.ndarray:
        hinted_right = "reply 0" in MODEL.decode(token_ids) or "reply 2" in MODEL.decode(token_ids)
        first = len(token_ids) - (5 if token_ids[-1] == 11 else 2)
        return np.where(np.arange(len(token_ids)) == first, -1.0 if hinted_right else -2.0, -3.0)

    def batch() -> list[Rollout]:
        """Lengths 2, 5, 2 and 2, all with credit; only the first two are looked at."""
        group = group_of([RIGHT, WRONG, RIGHT, WRONG], length=2)
        group[1] = rollout_of([11] * 5, reward=WRONG, said="reply 1", group="group-0")
        return [with_credit(rollout, 1.0 if rollout.reward else -1.0) for rollout in group]

    folded = batch()
    algorithm = await set_up(rlcsd_of(Teacher(score), eta=0.5))
    await algorithm.score_batch(survivors(folded))
    # |U| = |M| = 1 of L = 2: U times 2, M times .5 * 2. |U| = 4, |M| = 1 of L = 5: U times 5/4, M times .5 * 5.
    assert credit(folded[0]) == pytest.approx([1.5 * 1, 1 * 2])
    assert credit(folded[1]) == pytest.approx([-0.5 * 2.5, *[-1.25] * 4])
    assert algorithm.tally.take()["largest_multiplier"] == 2.5

    meant = batch()
    algorithm = await set_up(rlcsd_of(Teacher(score), eta=0.5, normalization="rollout_mean"))
    await algorithm.score_batch(survivors(meant))
    # N = 2 + 5 + 2 + 2 = 11 tokens, R = 4 rollouts, N / R = 2.75
    assert credit(meant[0]) == pytest.approx([1.5 * 0.5 * 2.75, 1 * 2.75])
    assert credit(meant[1]) == pytest.approx([-0.5 * 0.5 * 2.75, *[-1 * 2.75 / 4] * 4])
    # what the trainer's mean over N sees of each: (mean over U + eta * mean over M) / R
    assert sum(credit(meant[0])) / 11 == pytest.approx((1 + 0.5 * 1.5) / 4)
    assert sum(credit(meant[1])) / 11 == pytest.approx((-1 + 0.5 * -0.5) / 4)


async def test_under_rollout_mean_a_rollout_without_contrast_counts_as_much_as_any():
    algorithm = await set_up(rlcsd_of(normalization="rollout_mean"))
    short, long = rollout_of([1], reward=RIGHT), rollout_of([2] * 3, reward=RIGHT)
    await algorithm.score_batch(survivors([with_credit(short, 1.0), with_credit(long, 1.0)]))
    assert credit(short) == [2.0]  # N / (R * L) = 4 / (2 * 1)
    assert credit(long) == pytest.approx([4 / 6] * 3)


async def test_only_trainable_tokens_are_touched_over_turns_and_samples():
    algorithm = await set_up(rlcsd_of(template=PLAIN))
    talk = rollout_of([1, 2], [3], one_sample=True, reward=RIGHT, said="talk")
    apart = rollout_of([4, 5], [6], reward=RIGHT, said="apart")
    wrong = rollout_of([7], reward=WRONG, said="wrong")
    await processed(algorithm, [talk, apart, wrong])
    plain = pytest.approx(1 / math.sqrt(2), abs=1e-5)
    assert talk.samples[0].streams["advantages"][[0, 3]].tolist() == [0.0, plain]  # the prompt, an observation
    assert all(value != plain for value in credit(talk))
    assert [len(sample.streams["advantages"]) for sample in apart.samples] == [3, 2]
    assert algorithm.tally.take()["prefills"] == 2 + 2 * 2 + 0  # the wrong one has no incorrect sibling


async def test_the_outcome_depends_neither_on_the_order_of_arrival_nor_on_the_run():
    rewards = random.Random(0).choices([RIGHT, WRONG], k=16)

    async def outcome(order: Sequence[int], seed: int = 0) -> dict[int, list[float]]:
        algorithm = await set_up(rlcsd_of(tau=0.5), seed=seed)
        rollouts = [*group_of(rewards[:8]), *group_of(rewards[8:], "group-1")]
        for start in (0, 8):
            await algorithm.score_group(survivors(rollouts[start : start + 8]))
        await algorithm.score_batch(survivors([rollouts[index] for index in order]))
        return {index: credit(rollout) for index, rollout in enumerate(rollouts)}

    usual = await outcome(range(16))
    assert await outcome(range(16)) == usual
    for seed in range(5):
        assert await outcome(random.Random(seed).sample(range(16), 16)) == usual
    assert await outcome(range(16), seed=1) != usual


@pytest.mark.parametrize("said", ["a {brace} and {0}", "{response} {response}", "\\1 %s {{}}"])
async def test_a_hint_contains_the_response_verbatim(said: str):
    policy = Teacher()
    algorithm = await set_up(rlcsd_of(), policy)
    group = [
        rollout_of([1], reward=WRONG),
        rollout_of([2], reward=RIGHT, said=said),
        rollout_of([3], reward=WRONG, said="no"),
    ]
    await processed(algorithm, group)
    before, after = rlcsd.TEMPLATE.split(rlcsd.PLACEHOLDER)
    asked = [ids for ids, _ in policy.asked]
    assert [*hint_ids(before + said + after), 100, 1] in asked
    assert [*hint_ids(before + "no" + after), 100, 1] in asked


def test_a_siblings_response_is_all_that_it_said():
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        {"role": "user", "content": "An example?"},
        {"role": "assistant", "content": "An example in the prompt."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1."},
    ]
    rollout = rollout_of([1], [2], one_sample=True, said=said)
    assert response_text(rollout) == 'Hm.\nLet me see.\nadd({"a":1})\n\nIt is 1.'


async def test_a_rollout_without_a_response_is_reported_on_arrival():
    algorithm = await set_up(rlcsd_of())
    [view] = survivors([rollout_of([1], said=[{"role": "user", "content": "?"}])])
    with pytest.raises(ValueError, match="task-0"):
        await algorithm.score_rollout(view)
    await algorithm.score_rollout(survivors([rollout_of([1])])[0])


async def test_a_dead_teacher_leaves_plain_credit_and_is_logged_once(caplog: Any):
    teacher = Teacher(fails=lambda token_ids: True)
    algorithm = await set_up(rlcsd_of(teacher, max_concurrent=4))
    group = group_of([RIGHT] * 10 + [WRONG] * 10)
    with caplog.at_level(logging.WARNING):
        await processed(algorithm, group)
    assert all(credit(rollout) == pytest.approx([1 if rollout.reward else -1] * 3, abs=1e-5) for rollout in group)
    assert len(teacher.asked) == 4
    tally = algorithm.tally.take()
    assert (tally["teacher_failed"], tally["prefills"], tally["modulated_fraction"]) == (20, 0, 0)
    assert (tally["contrast_available"], tally["no_contrast"]) == (1, 0)
    [record] = [record for record in caplog.records if "contrast" in record.message]
    assert record.getMessage().startswith(
        "env: no contrast for 20 rollouts, which keep their plain credit: the teacher"
    )


async def test_a_teacher_that_fails_at_one_rollout_costs_that_one_its_contrast():
    algorithm = await set_up(rlcsd_of(Teacher(fails=lambda token_ids: token_ids[-1] == 11), template=PLAIN))
    group = group_of([RIGHT, RIGHT, WRONG, WRONG])
    await processed(algorithm, group)
    plain = [pytest.approx(1, abs=1e-5)] * 3
    assert [credit(rollout) == plain for rollout in group[:2]] == [False, True]
    assert algorithm.tally.take()["teacher_failed"] == 1


async def test_signs_are_those_of_the_group_credit():
    algorithm = await set_up(rlcsd_of(lam=5.0))
    group = group_of([RIGHT, WRONG, RIGHT, WRONG, RIGHT], length=20)
    await processed(algorithm, group)
    for rollout in group:
        signs = np.sign(credit(rollout))
        assert set(signs) <= {0, 1 if rollout.reward else -1}
    assert algorithm.tally.take()["modulated_fraction"] > 0.9


async def test_a_frozen_teacher_is_asked_and_closed_and_the_policy_is_neither():
    policy, teacher = Teacher(), Teacher()
    algorithm = await set_up(rlcsd_of(teacher), policy)
    await processed(algorithm, group_of([RIGHT, WRONG, RIGHT, WRONG]))
    await algorithm.stop()
    assert teacher.closed and teacher.asked and teacher.checked
    assert not (policy.closed or policy.asked or policy.checked)
    alone = await set_up(rlcsd_of(), policy)
    await alone.stop()
    assert policy.checked and not policy.closed


def test_a_template_without_a_place_for_the_response_is_refused():
    with refused(key="algo.template", value="{answer}"):
        algorithm_config({"type": "rlcsd", "template": "{answer}"}, "test")


def test_the_default_template_has_one_place():
    assert rlcsd.TEMPLATE.count(rlcsd.PLACEHOLDER) == 1


async def test_others_run_between_any_two_rollouts_of_a_large_batch():
    algorithm, turns = await set_up(rlcsd_of()), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    members = [rollout_of([1, 2], reward=1.0) for _ in range(50)]
    batch = survivors(members)
    await algorithm.score_group(batch)
    beside = asyncio.create_task(others())
    await algorithm.score_batch(batch)
    beside.cancel()
    assert turns >= 2 * len(members)  # once while evidence is gathered, once while credit is written
