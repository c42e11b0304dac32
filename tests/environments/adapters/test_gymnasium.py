"""Games in Gymnasium's form: with the library, and without it."""

import sys
import threading
from typing import Any

import pytest

from headrace.environments.adapters.gymnasium import GymnasiumText
from headrace.environments.base import EpisodeError, tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.script import play
from headrace.rollout.types import Rollout, Task
from tests.environments.adapters import games
from tests.refusals import refused

COUNT = "gymnasium:tests.environments.adapters.games:Count"


def count_up(messages: Any) -> str:
    return f"<action>{int(messages[-1]['content'].rstrip('.').split()[-1]) + 1}</action>"


async def play_one(answer: Any, name: str = COUNT, seed: int = 0, **args: Any) -> Rollout:
    environment = load_environment(name, args)
    (rollout,), _ = await play(environment, Task("game", {"seed": seed}), answer)
    return rollout


async def test_observations_and_actions_are_a_conversation_and_rewards_are_summed():
    rollout = await play_one(count_up)
    assert rollout.rewards == {"reward": 3.0}
    assert [message["content"] for message in rollout.messages] == [
        "Write your action between <action> and </action>.\n\nYou are at 0.",
        *("<action>1</action>", "You are at 1.", "<action>2</action>", "You are at 2.", "<action>3</action>"),
    ]
    assert rollout.stop_reason == "terminated"
    assert games.made[-1].closed


async def test_the_seed_and_the_arguments_reach_the_game():
    assert (await play_one(count_up, seed=1)).rewards == {"reward": 2.0}
    assert (await play_one(count_up, make={"highest": 5})).rewards == {"reward": 5.0}


async def test_a_reply_that_is_no_action_costs_a_turn_and_is_explained():
    said = iter(["1", "<action>1</action> <action>1</action>", "<action>1</action>"])
    rollout = await play_one(lambda messages: next(said), max_turns=3, bad_action=-0.25)
    assert rollout.rewards == {"reward": 1.0, "bad_action": -0.5}
    assert rollout.messages[2]["content"] == "Write your action between <action> and </action>."
    assert rollout.metrics == {"turns": 3, "bad_actions": 2}
    assert rollout.stop_reason == "max_turns"


async def test_the_whole_reply_may_be_the_action_and_words_of_ones_own_come_first():
    rollout = await play_one(lambda m: str(int(m[-1]["content"][-2]) + 1), tag="", prompt="Count to three.")
    assert rollout.rewards == {"reward": 3.0}
    assert rollout.messages[0]["content"] == "Count to three.\n\nYou are at 0."


async def test_reading_and_writing_may_be_ones_own():
    here = "tests.environments.adapters.games"
    rollout = await play_one(
        lambda m: "<action>1</action>", seed=1, max_turns=1, parse=f"{here}:double", render=f"{here}:shout"
    )
    assert rollout.rewards == {"reward": 1.0}  # twice one follows one
    assert rollout.messages[0]["content"].endswith("YOU ARE AT 1.")


async def test_a_game_that_waits_runs_in_threads():
    await play_one(count_up)
    assert games.made[-1].threads == {threading.get_ident()}
    await play_one(count_up, blocking=True)
    assert threading.get_ident() not in games.made[-1].threads


async def test_splits_have_seeds_of_their_own():
    seeds = [
        {task.data["seed"] for task in tasks_of(load_environment(COUNT, {"num_tasks": 50, "split": split}), "game")}
        for split in ("train", "eval")
    ]
    assert [len(some) for some in seeds] == [50, 50]
    assert not seeds[0] & seeds[1]


async def test_an_environment_of_the_older_form_is_named():
    with pytest.raises(EpisodeError, match=r"reset\(\).*'hello'"):
        await play_one(count_up, "gymnasium:tests.environments.adapters.games:OldForm")


async def test_a_registered_environment_is_drawn_in_text_and_acted_on_by_numbers():
    moves = iter([2, 7, "²", 1])
    rollout = await play_one(
        lambda m: f"<action>{next(moves)}</action>", "gymnasium:FrozenLake-v1", max_turns=4, make={"is_slippery": False}
    )
    texts = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert texts[0].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert texts[1] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert texts[2:4] == ["An action is a whole number from 0 to 3."] * 2
    assert rollout.stop_reason == "terminated"  # into the first hole
    assert rollout.rewards == {"reward": 0.0}


def test_a_name_that_gymnasium_does_not_have_is_named():
    with refused(key="environment", value="gymnasium:NoSuchLake-v1"):
        load_environment("gymnasium:NoSuchLake-v1", {})


def test_ones_own_game_needs_no_gymnasium(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert isinstance(load_environment(COUNT, {}), GymnasiumText)
    with refused(key="environment", value="gymnasium:FrozenLake-v1") as error:
        load_environment("gymnasium:FrozenLake-v1", {})
    assert "headrace[gymnasium]" in error.value.fix
