"""What is asked in evaluation is never asked in training: the first prompts, not only the tasks, are compared."""

import itertools
from collections import Counter

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.script import play
from headrace.environments.shipped.common import draw_tasks

LETTERS = {"items": "letters", "terse": True, "min_names_per_turn": 2, "max_names_per_turn": 3}


class Asked(Exception):
    """Nothing more is wanted of the episode."""


async def prompts(name: str, **args) -> list[str]:
    environment = load_environment(name, args)
    heard = []

    def listen(messages):
        heard.append(messages[0]["content"])
        raise Asked

    for task in tasks_of(environment, name):
        with pytest.raises(Asked):
            await play(environment, task, listen)
    return heard


@pytest.mark.parametrize(
    ("name", "args", "least"),
    [
        ("copy", {"min_letters": 1, "max_letters": 2}, 40),
        ("reverse-text", {"min_letters": 1, "max_letters": 2}, 60),
        ("arithmetic", {"digits": 1}, 10),
        ("calculator", {"max_terms": 2, "min_digits": 1, "max_digits": 1, "terse": True}, 20),
        ("countdown", {"numbers": 2, "largest": 9}, 10),
        ("countdown", {"numbers": 3, "largest": 9, "terse": True}, 100),
        ("alphabet-sort", {**LETTERS, "min_turns": 2, "max_turns": 2, "num_tasks": 3000}, 3000),
        ("file-search", {}, 24),
    ],
)
async def test_no_prompt_is_in_both_splits_whatever_the_seeds(name: str, args: dict, least: int):
    train = await prompts(name, split="train", seed=1, **args)
    evaluation = await prompts(name, split="eval", seed=2, **args)
    assert set(train).isdisjoint(evaluation)
    assert len(evaluation) >= least


async def test_the_numbers_of_countdown_are_a_new_task_in_no_other_order():
    tasks = {
        split: load_environment("countdown", {"split": split, "numbers": 3, "largest": 9}).tasks()
        for split in ("train", "eval")
    }
    seen = {
        split: Counter((tuple(sorted(task["numbers"])), task["target"]) for task in listed)
        for split, listed in tasks.items()
    }
    assert seen["train"].keys().isdisjoint(seen["eval"])
    assert set(seen["train"].values()) == set(seen["eval"].values()) == {1}


def test_letters_of_a_first_question_come_in_no_other_order_in_the_other_split():
    args = {**LETTERS, "min_turns": 2, "max_turns": 2, "num_tasks": 4000}
    train, evaluation = (load_environment("alphabet-sort", {**args, "split": s}).tasks() for s in ("train", "eval"))
    assert len(train) == len(evaluation) == 4000  # more than first questions: the second turn makes different tasks
    first = [{frozenset(task["batches"][0]) for task in tasks} for tasks in (train, evaluation)]
    assert first[0].isdisjoint(first[1])
    assert len(first[1]) > 200  # about a tenth of the 325 pairs and 2600 triples


def test_tasks_of_one_identity_are_one_task():
    def draw(rng):
        return {"n": rng.randrange(40), "noise": rng.random()}

    drawn = [draw_tasks(draw, split, 1000, 0, identity=lambda task: task["n"]) for split in ("train", "eval")]
    assert sorted(task["n"] for task in itertools.chain(*drawn)) == list(range(40))


def test_tasks_are_drawn_when_they_are_asked_for():
    drawn: list[int] = []
    tasks = draw_tasks(lambda rng: drawn.append(1) or {"n": rng.random()}, "train", 1000, 0)
    assert not drawn
    next(tasks)
    assert 1 <= len(drawn) < 200
