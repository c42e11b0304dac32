"""The numbers of an evaluation, worked by hand: means without what failed, pass@k where rewards are binary."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.orchestrator.batch_metrics import eval_metrics, failure_notice, is_empty
from headrace.orchestrator.signals import EvalBatch, Kind, ScoredGroup
from headrace.rollout.types import Group, Rollout, RolloutError, Task, Turn
from headrace.rollout.version import Version

FAILED = RolloutError("environment", "ValueError: no such tool")


def episode(number: int, reward: float, versions: tuple[int, ...] = (0,), turns: int = 1, **fields: Any) -> Rollout:
    turn = Turn([1], [2] * len(versions), [0.0] * len(versions), versions, 1.0)
    return Rollout(episode=number, reward=reward, turns=[turn] * turns, **fields)


def failed(number: int) -> Rollout:
    return Rollout(episode=number, error=FAILED)


def evaluated(*groups: list[Rollout], size: int = 2, solved: float | None = None) -> EvalBatch:
    batch = EvalBatch("e", Version(0, 7), size, solved)
    for number, members in enumerate(groups):
        batch.groups.append(
            ScoredGroup(
                Kind.EVAL,
                Group(f"g{number}", Task("e", {"n": number}), size, 7),
                [rollout for rollout in members if rollout.error is None],
                [(rollout, rollout.error.reason) for rollout in members if rollout.error is not None],
            )
        )
    batch.metrics = eval_metrics(batch)
    return batch


def numbers(batch: EvalBatch, mark: str = "") -> dict[str, float]:
    return {name.removeprefix("eval/e/"): value for name, value in batch.metrics.items() if mark in name}


def test_a_failed_episode_is_left_out_of_the_mean_and_counted_by_itself():
    batch = evaluated([episode(0, 1.0, (0, 0)), episode(1, 0.5, (0, 1))], [episode(0, 0.25, (1,)), failed(1)])
    found = numbers(batch)
    assert found["avg@2"] == 0.5  # tasks: (1 + .5) / 2 and .25, over the one that ended
    assert found["errors"] == 0.25
    assert (found["version/min"], found["version/max"]) == (0, 1)


def test_where_every_episode_failed_there_is_no_mean_and_a_notice():
    batch = evaluated([failed(0), failed(1)])
    assert numbers(batch) == {"errors": 1.0}
    notice = failure_notice(batch)
    assert notice is not None and FAILED.detail in notice and "no score" in notice


@pytest.mark.parametrize(("failures", "is_noticed"), [(0, False), (1, False), (2, True)])
def test_more_than_one_in_twenty_failures_are_worth_a_notice(failures: int, is_noticed: bool):
    members = [failed(n) if n < failures else episode(n, 1.0) for n in range(20)]
    assert (failure_notice(evaluated(members, size=20)) is not None) == is_noticed


def test_binary_rewards_have_pass_at_every_power_of_two_up_to_the_group_size():
    half = [episode(n, float(n < 2)) for n in range(4)]
    none = [episode(n, 0.0) for n in range(4)]
    # Of the first task 2 of 4 are right: 1/2; 1 - C(2, 2) / C(4, 2) = 5/6; 1. Of the second none is.
    assert numbers(evaluated(half, none, size=4), "pass@") == pytest.approx(
        {"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5}
    )


def test_pass_at_k_leaves_out_tasks_that_failures_left_too_few_episodes():
    solved, lost = [episode(0, 1.0), episode(1, 0.0)], [episode(0, 0.0), failed(1)]
    assert numbers(evaluated(solved, lost), "pass@") == {"pass@1": 0.25, "pass@2": 1.0}


def test_graded_rewards_have_pass_at_k_only_with_a_threshold():
    members = [episode(0, 0.8), episode(1, 0.3)]
    assert numbers(evaluated(members), "pass@") == {}
    assert numbers(evaluated(members, solved=0.8), "pass@") == {"pass@1": 0.5, "pass@2": 1.0}


def test_an_episode_is_right_by_what_is_called_correct_whatever_else_it_earned():
    wrong = [episode(0, 2.5, metrics={"correct": 0.0}), episode(1, 1.0, metrics={"correct": 0.0})]
    right = [episode(0, 0.5, metrics={"correct": 1.0}), episode(1, 0.5, metrics={"correct": 1.0})]
    assert numbers(evaluated(wrong, right), "pass@") == {"pass@1": 0.5, "pass@2": 0.5}


def test_an_episode_with_several_agents_comes_to_the_mean_over_those_that_are_trained():
    members = [
        *(episode(0, 1.0, agent="first"), episode(0, 0.0, agent="second")),
        episode(0, 9.0, agent="house", trainable=False),
        *(episode(1, 1.0, agent="first"), episode(1, 1.0, agent="second")),
        *(episode(2, 0.0, agent="first"), Rollout(episode=2, agent="second", error=FAILED)),
    ]
    found = numbers(evaluated(members, size=3))
    # Three episodes: (1 + 0) / 2, (1 + 1) / 2 and one in which an agent failed.
    assert {name: value for name, value in found.items() if name.endswith("avg@3")} == {
        "avg@3": 0.75,
        "first/avg@3": 1.0,
        "second/avg@3": 0.5,
    }
    assert found["errors"] == pytest.approx(1 / 3)


def test_what_only_scripts_played_has_no_versions_and_still_a_score():
    found = numbers(evaluated([Rollout(episode=0, agent="house", trainable=False, reward=1.0)], size=1))
    assert found["avg@1"] == 1.0
    assert not any("version" in name for name in found)


def test_turns_truncation_and_empty_answers_are_counted_over_what_ended():
    empty = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": " \n"}]
    found = numbers(
        evaluated([episode(0, 0.0, turns=3, truncated=True), episode(1, 0.0, messages=empty)], [failed(0), failed(1)])
    )
    assert (found["truncated"], found["empty"]) == (0.5, 0.5)
    assert (found["num_turns/mean"], found["num_turns/max"], found["num_turns/min"]) == (2.0, 3, 1)


@pytest.mark.parametrize(
    ("reply", "empty"),
    [
        ({"content": "4"}, False),
        ({"content": ""}, True),
        ({"content": None, "reasoning_content": "two and two"}, True),
        ({"content": None, "tool_calls": [{"function": {"name": "add"}}]}, False),
        ({"content": [{"type": "text", "text": "4"}]}, False),
    ],
)
def test_an_answer_is_empty_without_text_or_a_tool_call(reply: dict[str, Any], empty: bool):
    assert is_empty(Rollout(messages=[{"role": "assistant", **reply}])) == empty
