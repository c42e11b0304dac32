"""Countdown: every task solvable, only honest solutions paid."""

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import play
from headrace.environments.shipped.countdown import Countdown
from headrace.environments.shipped.expression import evaluate
from headrace.rollout.types import Task
from tests.refusals import refused

TASK = Task("countdown", {"numbers": [3, 5, 7], "target": 22, "solution": "(3*5)+7"})


async def worth(answer: str, **args) -> dict[str, float]:
    (rollout,), _ = await play(Countdown(num_tasks=1, **args), TASK, lambda messages: answer)
    return rollout.rewards


@pytest.mark.parametrize("terse", [False, True])
async def test_gold_earns_all_of_every_task(terse: bool):
    environment = load_environment("countdown", {"num_tasks": 60, "terse": terse, "numbers": 5})
    for task in tasks_of(environment, "countdown"):
        assert evaluate(task.data["solution"]) == task.data["target"]
        (rollout,), _ = await play(environment, task, lambda messages, task=task: environment.gold(task, messages))
        assert rollout.rewards == {"solved": 1.0, "format": 0.1}


@pytest.mark.parametrize(
    ("expression", "solved", "in_format"),
    [
        ("3*5+7", 1, 1),
        (" 7 + 5 * 3 ", 1, 1),
        ("3+5+7", 0, 1),
        ("22", 0, 0),  # not these numbers
        ("3*7+1", 0, 0),
        ("3*5+7+5-5", 0, 0),  # one used twice
        ("3**5+7", 0, 0),
        ("3.0*5+7", 0, 0),
        ("3*5+7 or 3+5+7", 0, 0),
        ("", 0, 0),
        ("7/(5-5)*3", 0, 0),
        ("(" * 5000 + "3*5+7", 0, 0),
        ("9**9**9**9", 0, 0),
    ],
)
async def test_an_answer_is_worth_what_it_comes_to(expression: str, solved: float, in_format: float):
    wanted = {"solved": solved, "format": pytest.approx(0.1 * in_format)}
    assert await worth(f"I think <answer>{expression}</answer>") == wanted
    assert await worth(expression, terse=True) == wanted


async def test_two_answers_are_none():
    assert (await worth("<answer>3+5+7</answer><answer>3*5+7</answer>"))["solved"] == 0


def test_splits_share_no_task():
    train, evaluation = (
        load_environment("countdown", {"split": s, "numbers": 2, "largest": 9}).tasks() for s in ("train", "eval")
    )
    assert {str(task) for task in train}.isdisjoint(str(task) for task in evaluation)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"numbers": 1}, "numbers"),
        ({"terse": "yes"}, "terse"),
        ({"num_tasks": True}, "num_tasks"),
        ({"split": "test"}, "split"),
    ],
)
def test_wrong_args_say_what_is_right(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("countdown", args)
