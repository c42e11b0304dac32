"""Providers, rewards and an objective as an environment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.environments.base import Environment, tasks_of
from headrace.environments.hackable.environment import add_tokenizer
from headrace.environments.registry import load_environment
from headrace.environments.script import play
from headrace.environments.workers import WorkerPool
from headrace.orchestrator.processing import EvalProcessing
from headrace.rollout.types import Group, Rollout, Task, Turn
from tests.environments.hackable.completions import STRICT, thought, write_tokenizer
from tests.refusals import refused

WEIGHTED = {"reward_mode": "weighted_length_penalty"}


def hackable(**args: Any) -> Environment:
    return load_environment("hackable", {"provider": "arithmetic", "provider_kwargs": {"num_tasks": 4}, **args})


async def scored(environment: Environment, *completions: str, versions: tuple[int, ...] = (0,)) -> list[Rollout]:
    """A group of the first task, as a run scores it."""
    task = tasks_of(environment, "hackable")[0]
    rollouts = [(await play(environment, task, lambda messages, text=text: text))[0][0] for text in completions]
    for number, rollout in enumerate(rollouts):
        rollout.episode, rollout.env = number, "hackable"
        version = versions[number % len(versions)]
        rollout.turns = [Turn([1], [2, 3], [0.0, 0.0], [max(0, version - 1), version], 1.0)]
    group = Group("g", task, len(rollouts), 0)
    await EvalProcessing({"hackable": environment}).process_group(group, rollouts)
    return rollouts


def answer_of(environment: Environment) -> str:
    return str(tasks_of(environment, "hackable")[0].data["answer"])


async def test_a_group_earns_what_its_objective_makes_of_it():
    environment = hackable(objective_kwargs=WEIGHTED)
    answer = answer_of(environment)
    brief, long, wrong, loose = await scored(
        environment, thought(2, answer), thought(6, answer), thought(4, "no"), f"\\boxed{{{answer}}}"
    )
    # the mean of the thoughts is 4: brevity 1/2, 0 and 0; right + lambda * right * brevity + format
    assert [r.reward for r in (brief, long, wrong, loose)] == [1 + 0.5 * 0.5 + 1, 2.0, 1.0, 1.0]
    assert brief.rewards == {"objective": 2.25}
    assert brief.metrics == {
        "gsm8k_correctness_reward": 1.0,
        "format_tag_reward": 1.0,
        "length_penalty_reward": 0.5,
        "correct": 1.0,
        "format": 1.0,
        "thinking_words": 2.0,
        "stage": 1.0,
        "length_penalty_lambda": 0.5,
    }
    assert (loose.metrics["correct"], loose.metrics["format"]) == (1.0, 0.0)
    assert "thinking_words" not in loose.metrics
    await environment.close()


async def test_what_is_scored_and_recorded_is_all_that_was_written():
    environment = hackable()
    text = thought(3, answer_of(environment))
    (rollout,) = await scored(environment, text)
    assert rollout.messages[-1] == {"role": "assistant", "content": text}


async def test_another_reward_may_say_what_is_right():
    environment = hackable(objective_kwargs={"correctness_reward": "exact_match_reward"})
    (rollout,) = await scored(environment, answer_of(environment))
    assert (rollout.metrics["correct"], rollout.metrics["format"], rollout.reward) == (1.0, 0.0, 1.0)


async def test_tokens_of_the_run_model_are_counted_unless_a_reward_names_another(tmp_path: Path):
    letters = str(write_tokenizer(tmp_path / "letters"))
    environment = hackable(objective_kwargs=WEIGHTED, tokenizer_name=letters)
    (rollout,) = await scored(environment, thought(3))  # "so so so"
    assert (rollout.metrics["thinking_tokens"], rollout.metrics["thinking_words"]) == (6.0, 3.0)
    asked = ["length_penalty_reward", "format_tag_reward"]
    assert add_tokenizer(asked, {}, "m") == {"length_penalty_reward": {"tokenizer_name": "m"}}
    own = {"length_penalty_reward": {"tokenizer_name": "", "group_size": 2}}
    assert add_tokenizer(asked, own, "m") == own
    assert add_tokenizer(asked, {}, None) == {}


STAGES = {**WEIGHTED, "length_penalty_lambda": 0.25, "stage2_length_penalty_lambda": 1.0}


@pytest.mark.parametrize(
    ("start", "args", "first"),
    [
        ({"stage2_start_step": 7}, {}, 7),
        ({"stage2_start_epoch": 2}, {"groups_per_step": 1}, 8),  # 4 tasks: step 8 ends the second pass
        ({"stage2_start_epoch": 1.5}, {"groups_per_step": 0.5}, 12),
        (
            {"stage2_start_epoch": 1},  # of the data that is trained on, which has 10
            {"groups_per_step": 2, "trained_on": {"provider": "arithmetic", "kwargs": {"num_tasks": 10}}},
            5,
        ),
    ],
)
async def test_the_second_stage_begins_with_the_first_group_that_newer_weights_wrote(
    start: dict[str, float], args: dict[str, Any], first: int
):
    environment = hackable(objective_kwargs=STAGES | start, **args)
    answer = answer_of(environment)
    group = thought(2, answer), thought(6, answer)
    before = await scored(environment, *group, versions=(first - 1, first - 2))
    across = await scored(environment, *group, versions=(first - 1, first))  # the boundary lies within the group
    assert [rollout.metrics["stage"] for rollout in (*before, *across)] == [1, 1, 2, 2]
    assert [rollout.metrics["length_penalty_lambda"] for rollout in (before[0], across[0])] == [0.25, 1.0]
    assert before[0].reward == pytest.approx(2 + 0.25 * 0.5)
    assert across[0].reward == pytest.approx(2 + 1.0 * 0.5)


async def test_a_reward_that_has_no_number_costs_its_completion_and_says_why():
    environment = load_environment(
        "hackable",
        {
            "provider": "arithmetic",
            "objective": "tests.environments.hackable.plugins:Fussy",
            "reward_timeout": 0.2,
        },
    )
    fine, nan = await scored(environment, "fine", "nan")
    assert (fine.reward, fine.error) == (1.0, None)
    assert nan.error is not None and nan.error.reason == "reward_no_number"
    assert "'tests.environments.hackable.plugins:fussy'" in nan.error.detail
    for text, reason in {"raise": "reward_failed", "hang": "reward_timeout", "fewer": "reward_wrong_count"}.items():
        group = await scored(environment, "fine", text)
        assert [rollout.error.reason for rollout in group if rollout.error] == [reason] * 2
        assert all("'tests.environments.hackable.plugins:fussy'" in str(rollout.error) for rollout in group)


def test_samples_are_tasks_by_their_keys():
    environment = hackable()
    first = tasks_of(environment, "hackable")[0]
    assert set(first.data) == {"key", "prompt", "answer", "info"}
    assert first.key == first.data["key"] == first.data["info"]["key"]
    assert len(tasks_of(environment, "hackable")) == 4


def local(path: Path, *rows: dict[str, Any]) -> Environment:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    return hackable(provider="local", provider_kwargs={"path": str(path)})


def test_rows_that_repeat_a_question_are_tasks_of_their_own_and_leave_the_keys_of_others_as_they_are(tmp_path: Path):
    unique, first, *others = [
        {"id": number, "question": question, "answer": "4"} for number, question in enumerate(["1+3?", *["2+2?"] * 3])
    ]
    plain = tasks_of(local(tmp_path / "plain.jsonl", unique, first), "hackable")
    tasks = tasks_of(local(tmp_path / "repeated.jsonl", unique, first, *others, others[0]), "hackable")
    assert tasks[:2] == plain
    assert len({task.key for task in tasks}) == 4
    assert tasks[4] == tasks[2]  # the same row again is the same task
    assert len({task.data["info"]["key"] for task in tasks[1:]}) == 1  # by which records of the question are found
    grown = tasks_of(local(tmp_path / "grown.jsonl", unique, first, {**first, "id": 9}, *others), "hackable")
    assert [task.key for task in grown[3:]] == [task.key for task in tasks[2:4]]


def test_a_group_of_a_repeated_question_is_scored_by_its_own_row(tmp_path: Path):
    rows = [{"id": number, "question": "2+2?", "answer": "4"} for number in range(2)]
    environment = local(tmp_path / "rows.jsonl", *rows)
    rollouts = [Rollout(env="hackable", task_key=task.key) for task in tasks_of(environment, "hackable")]
    assert [environment._find_row(rollout)["info"]["id"] for rollout in rollouts] == [0, 1]  # type: ignore[attr-defined]


def test_another_question_under_the_same_key_is_refused_with_what_to_do(tmp_path: Path):
    rows = [{"key": "a", "question": f"{number}+2?", "answer": "4"} for number in range(2)]
    with refused(key="environment", value="hackable") as error:
        tasks_of(local(tmp_path / "rows.jsonl", *rows), "hackable")
    assert "task 1 " in error.value.fact and "key" in error.value.fix


def test_it_demonstrates_what_has_a_solution():
    environment = hackable(demonstrate_mistakes=1.0)
    task = tasks_of(environment, "hackable")[0]
    gold = environment.gold(task, [])
    assert gold == STRICT.write(task.data["info"]["solution"], task.data["answer"])
    mistake = environment.mistake(task, [], random.Random(0))
    assert isinstance(mistake, str) and STRICT.parse(mistake) is not None and mistake != gold
    plain = load_environment("hackable", {"provider": "tests.environments.hackable.plugins:numbers"})
    with pytest.raises(NotImplementedError, match=r"no info\.solution"):
        plain.gold(Task("e", plain.tasks()[0]), [])  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"provider": "gsm"}, {"value": "gsm"}),
        ({"objective": "x"}, {"value": "x"}),
        ({"objective_kwargs": {"a": 1}}, {"key": "a"}),
        ({"reward_kwargs": {"format_tag_reward": {"a": 1}}}, {"key": "a"}),
        ({"reward_timeout": -1}, {}),
        ({"groups_per_step": "many"}, {}),
        ({"rewards": {}}, {}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args: dict[str, Any], fields: dict[str, str]):
    with refused(**fields):
        hackable(**args)


async def test_worker_processes_score_groups_whose_episodes_others_ran():
    args = {"provider": "arithmetic", "provider_kwargs": {"num_tasks": 4}, "objective_kwargs": WEIGHTED}
    here = load_environment("hackable", args)
    answer = answer_of(here)
    expected = [rollout.metrics for rollout in await scored(here, thought(2, answer), thought(6, answer))]
    played = await scored(hackable(objective_kwargs=WEIGHTED), thought(2, answer), thought(6, answer))
    for rollout in played:
        rollout.rewards, rollout.metrics = {}, {}
    pool = WorkerPool(here, "hackable", args, size=1)
    await pool.start()
    try:
        await pool.score_group(played)
    finally:
        await pool.close()
    assert [rollout.metrics for rollout in played] == expected
