"""`@environment`: a prompt, rows and rewards."""

import random

import pytest

from headrace.environments import environment
from headrace.environments.base import EpisodeError, tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.rewards import Exact
from headrace.environments.script import play
from headrace.rollout.types import Task
from tests.refusals import refused


def words(split: str = "train", count: int = 3):
    for number in range(count):
        yield {"word": f"{split}{number}", "answer": f"{split}{number}".upper()}


def length(text, data):
    return len(text) / 10


@environment(data=words, rewards={"exact": Exact("answer")}, metrics=[length], system="Be loud.")
def shout(row):
    """Write a word in capitals."""
    return f"Write {row['word']}."


@environment(data=words, rewards={"exact": Exact("word")}, raw=True, gold=lambda row: row["word"])
def repeat(row):
    return [{"role": "system", "content": "Repeat."}, {"role": "user", "content": row["word"]}]


class ClosingReward:
    def __init__(self):
        self.closed = 0

    def __call__(self, text, data):
        return 1.0

    async def close(self):
        self.closed += 1


async def test_the_prompt_the_reward_and_the_metrics_come_from_the_row():
    made = load_environment(f"{__name__}:shout", {"split": "eval", "count": 2})
    assert list(made.tasks()) == [{"word": f"eval{n}", "answer": f"EVAL{n}"} for n in (0, 1)]
    (rollout,), script = await play(made, Task("shout", made.tasks()[1]), lambda messages: "EVAL1")
    assert script.calls == [
        ([{"role": "system", "content": "Be loud."}, {"role": "user", "content": "Write eval1."}], [])
    ]
    assert rollout.rewards == {"exact": 1.0}
    assert rollout.metrics == {"length": 0.5}
    assert rollout.messages[-1] == {"role": "assistant", "content": "EVAL1"}


async def test_a_wrong_answer_earns_nothing():
    made = shout()
    (rollout,), _ = await play(made, Task("shout", made.tasks()[0]), lambda messages: "train0")
    assert rollout.rewards == {"exact": 0.0}


async def test_raw_rewards_see_thoughts_and_a_prompt_may_be_messages():
    made = repeat()
    answer = {"role": "assistant", "content": "train0", "reasoning_content": "easy"}
    (rollout,), script = await play(made, Task("repeat", made.tasks()[0]), lambda messages: answer)
    assert rollout.rewards == {"exact": 0.0}  # "<think>\neasy\n</think>\n\ntrain0" is not "train0"
    assert script.calls[0][0][0] == {"role": "system", "content": "Repeat."}


def test_the_best_answer_is_the_rows_answer_unless_gold_says_otherwise():
    task = Task("any", {"word": "a", "answer": "A"})
    assert shout().gold(task, []) == "A"
    assert repeat().gold(task, []) == "a"


def test_without_answer_or_gold_the_message_says_what_to_implement():
    with pytest.raises(NotImplementedError, match=r"shout.*gold"):
        shout().gold(Task("any", {"word": "a"}), [])


def test_args_that_the_data_does_not_take_are_refused_by_name():
    with refused(EnvironmentNotFound, key="args.colour"):
        load_environment(f"{__name__}:shout", {"colour": "blue"})


def test_it_has_the_functions_name_and_words():
    assert (shout.__name__, shout.__doc__) == ("shout", "Write a word in capitals.")


async def test_closing_it_closes_its_rewards():
    reward = ClosingReward()

    @environment(data=words, rewards={"one": reward}, metrics={"again": reward})
    def closing(row):
        return "?"

    await closing().close()
    assert reward.closed == 2


async def test_a_reward_that_fails_is_named():
    def broken(text, data):
        return 1 / 0

    @environment(data=words, rewards=[broken])
    def breaking(row):
        return "?"

    with pytest.raises(EpisodeError, match="broken") as failure:
        await play(breaking(), tasks_of(breaking(), "breaking")[0], lambda messages: "!")
    assert failure.value.reason == "reward_failed"


def test_a_mistake_is_the_gold_reply_to_another_answer():
    task = Task("any", {"word": "a", "answer": "I"})
    wrong = shout().mistake(task, [], random.Random(0))
    assert wrong != "I"
    assert len(wrong) == 1
    # where gold does not depend on `answer`, it is gold itself with a letter changed
    assert repeat().mistake(task, [], random.Random(0)) != "a"
