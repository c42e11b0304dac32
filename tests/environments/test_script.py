"""Episodes without a model, demonstrations, and the checks on tasks."""

import random
from itertools import islice

import pytest

from headrace.environments import Chat, Environment
from headrace.environments.base import tasks_of
from headrace.environments.script import call_tool, demonstrate, perturb_reply, play
from headrace.errors import BadInput
from headrace.rollout.types import RolloutError, Task
from tests.refusals import refused


class Doubling(Environment):
    """Two turns with a tool: double a number, then say it."""

    def __init__(self, mistakes: float = 0.0) -> None:
        self.demonstrate_mistakes = mistakes
        self.life: list[str] = []

    def tasks(self):
        return ({"n": n} for n in range(1, 50))

    async def run(self, task, context):
        def double(n: int) -> int:
            """Twice the number."""
            return 2 * n

        chat = Chat(context, str(task.data["n"]), tools=[double], max_turns=2)
        await chat.act()
        return [chat.rollout({"right": float(chat.text == str(2 * task.data["n"]))})]

    def gold(self, task, messages):
        if messages[-1]["role"] == "user":
            return call_tool("double", n=task.data["n"])
        return messages[-1]["content"]

    async def start(self):
        self.life.append("started")

    async def close(self):
        self.life.append("closed")


async def test_gold_replies_play_a_tool_episode_to_its_reward():
    (rollout,), script = await play(
        Doubling(), Task("double", {"n": 21}), lambda m: Doubling().gold(Task("", {"n": 21}), m)
    )
    assert rollout.rewards == {"right": 1.0}
    assert rollout.metrics == {"tool_calls": 1, "tool_errors": 0}
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "42"
    assert len(script.calls) == 2


def test_demonstrations_are_gold_episodes_with_their_tools():
    for shown in islice(demonstrate(Doubling(), seed=1), 20):
        asked, call, result, said = shown.messages
        assert call["tool_calls"][0]["function"] == {"name": "double", "arguments": {"n": int(asked["content"])}}
        assert said["content"] == result["content"] == str(2 * int(asked["content"]))
        assert shown.tools[0]["function"]["name"] == "double"


class Judged(Environment):
    """A judge without tools speaks first, then a solver with one and a helper with another, which at times fails."""

    def __init__(self, trainable: bool = True) -> None:
        self.trainable = trainable

    def tasks(self):
        return [{"n": n} for n in range(10)]

    async def run(self, task, context):
        def solve(n: int) -> str:
            """Solve it."""
            return "solved"

        def look(n: int) -> str:
            """Look it up."""
            return "found"

        rules = {"role": "system", "content": "Be brief."}
        judge = Chat(context, [rules, {"role": "user", "content": "judge"}], agent="judge", trainable=False)
        solver = Chat(context, [rules, {"role": "user", "content": "solve"}], tools=[solve], trainable=self.trainable)
        helper = Chat(context, [rules, {"role": "user", "content": "look"}], tools=[look], trainable=self.trainable)
        for chat in (judge, solver, helper):
            await chat.reply()
        rollouts = [helper.rollout({}), judge.rollout({}), solver.rollout({})]
        if task.data["n"] % 2:
            rollouts[0].error = RolloutError("no_disk")
        return rollouts

    def gold(self, task, messages):
        return "ok"


def test_each_rollout_is_shown_with_its_own_tools_and_a_judge_or_a_failed_one_never():
    shown = list(islice(demonstrate(Judged(), seed=0), 40))
    asked = [one.messages[1]["content"] for one in shown]
    assert [one.tools[0]["function"]["name"] for one in shown] == asked
    assert 20 < asked.count("solve") < 40  # a helper fails every other time
    assert asked.count("look") == 40 - asked.count("solve")


def test_an_environment_with_nothing_to_show_says_so():
    with pytest.raises(BadInput, match="Judged"):
        next(demonstrate(Judged(trainable=False), seed=0))


def test_demonstrations_are_reproducible_and_differ_by_seed():
    def first(seed: int):
        return [shown.messages for shown in islice(demonstrate(Doubling(0.5), seed), 30)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_the_asked_share_of_replies_are_mistakes():
    shown = [one.messages for one in islice(demonstrate(Doubling(0.3), seed=0), 2000)]
    wrong_calls = sum(m[1]["tool_calls"][0]["function"]["arguments"]["n"] != int(m[0]["content"]) for m in shown)
    assert wrong_calls / 2000 == pytest.approx(0.3, abs=0.041)  # four standard deviations: sqrt(.3 * .7 / 2000) = .0102


def test_the_environment_lives_as_long_as_its_demonstrations():
    environment = Doubling()
    shown = demonstrate(environment, seed=0)
    next(shown)
    assert environment.life == ["started"]
    shown.close()
    assert environment.life == ["started", "closed"]


@pytest.mark.parametrize("gold", ["42", "x = 7 then 12", "seven", "A", "!?", "", "4" * 5000])
def test_a_perturbed_text_is_another_text(gold: str):
    rng = random.Random(0)
    assert all(perturb_reply(gold, rng) != gold for _ in range(50))


def test_of_a_text_with_numbers_the_last_is_changed():
    assert str(perturb_reply("3 + 4 = 7", random.Random(0))).startswith("3 + 4 = ")


def test_a_perturbed_message_keeps_its_shape():
    changed = perturb_reply(call_tool("double", n=3, of="pears"), random.Random(0))
    assert isinstance(changed, dict)
    arguments = changed["tool_calls"][0]["function"]["arguments"]
    assert arguments["n"] != 3
    assert arguments["of"] != "pears"
    assert len(arguments["of"]) == 5


class Tasks(Environment):
    def __init__(self, *tasks):
        self._tasks = tasks

    def tasks(self):
        yield from self._tasks


def test_a_tasks_key_is_its_own_or_a_hash_of_its_content():
    own, hashed, again = tasks_of(Tasks({"key": "first", "n": 1}, {"n": 1}, {"n": 1}), "env")
    assert own.key == "first"
    assert hashed.key == again.key == Task("env", {"n": 1}).key


def test_two_tasks_of_one_key_with_different_data_are_refused():
    with refused(key="environment", value="env") as error:
        tasks_of(Tasks({"key": "same", "n": 1}, {"key": "same", "n": 2}), "env")
    assert "task 1 " in error.value.fact and "'same'" in error.value.fact


@pytest.mark.parametrize("task", ["text", {"of": object()}, {1: {2j}}])
def test_a_task_that_is_not_json_is_named(task):
    with refused(key="environment", value="env") as error:
        tasks_of(Tasks(task), "env")
    assert "task 0 " in error.value.fact


def test_an_environment_without_tasks_is_refused():
    with refused(key="environment", value="env"):
        tasks_of(Tasks(), "env")
