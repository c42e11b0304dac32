"""Arithmetic and copying: tasks from a seed, exact rewards."""

import re

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import play
from headrace.environments.shipped.common import draw_tasks
from tests.refusals import refused


@pytest.mark.parametrize("name", ["arithmetic", "copy"])
def test_no_task_is_in_both_splits_and_a_seed_fixes_them(name: str):
    train, evaluation = (load_environment(name, {"split": split}).tasks() for split in ("train", "eval"))
    assert {str(task) for task in train}.isdisjoint(str(task) for task in evaluation)
    assert list(train) == list(load_environment(name, {"split": "train"}).tasks())
    assert list(train) != list(load_environment(name, {"split": "train", "seed": 1}).tasks())


def test_every_answer_is_right():
    for task in load_environment("arithmetic", {"digits": 3, "operations": "+-*"}).tasks():
        left, sign, right = re.fullmatch(r"(\d+)([-+*])(\d+)", task["question"]).groups()
        wanted = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        assert task["answer"] == str(wanted)
        assert len(left) <= 3


async def test_only_the_number_alone_is_right():
    environment = load_environment("arithmetic", {})
    task = next(task for task in tasks_of(environment, "arithmetic") if task.data["answer"] == "12")
    for answer, worth in (
        ("12", 1),
        (" 12\n", 1),
        ("13", 0),
        ("12 or 13", 0),
        ("", 0),
        ("twelve", 0),
        ("12" * 10**6, 0),
    ):
        (rollout,), _ = await play(environment, task, lambda messages, answer=answer: answer)
        assert rollout.rewards == {"correct": worth}, answer


async def test_terse_asks_without_a_word():
    environment = load_environment("arithmetic", {"terse": True})
    task = tasks_of(environment, "arithmetic")[0]
    _, script = await play(environment, task, lambda messages: "0")
    assert script.calls[0][0] == [{"role": "user", "content": f"{task.data['question']}="}]


async def test_a_copy_earns_by_its_likeness():
    environment = load_environment("copy", {"min_letters": 4, "max_letters": 4})
    task = tasks_of(environment, "copy")[0]
    word = task.data["answer"]
    for answer, worth in ((word, 1.0), (word[:2], 2 * 2 / 6), ("", 0.0), (word * 10**6, 2 * 4 / 36)):
        (rollout,), _ = await play(environment, task, lambda messages, answer=answer: answer)
        assert rollout.rewards["similarity"] == pytest.approx(worth)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"operations": "+/"}, "operations"),
        ({"digits": 0}, "digits"),
        ({"split": "test"}, "split"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"num_tasks": True}, "num_tasks"),
        ({"operations": 5}, "operations"),
        ({"split": ["train"]}, "split"),
        ({"demonstrate_mistakes": 7}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_say_what_is_right(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("arithmetic", args)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"min_letters": 9}, "max_letters"),
        ({"min_letters": 0}, "min_letters"),
        ({"num_tasks": "5"}, "num_tasks"),
        ({"demonstrate_mistakes": 7}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_of_copying_say_what_is_right(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("copy", args)


def test_a_small_world_gives_the_tasks_it_has():
    tasks = draw_tasks(lambda rng: {"n": rng.randrange(40)}, "train", 1000, 0)
    evaluation = draw_tasks(lambda rng: {"n": rng.randrange(40)}, "eval", 1000, 0)
    assert sorted(task["n"] for task in [*tasks, *evaluation]) == list(range(40))
