"""Games of textarena, by one seat and by two."""

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.environments.adapters.textarena import random_move
from headrace.environments.base import Environment, EpisodeError, Reply
from headrace.environments.registry import load_environment
from headrace.environments.script import play
from headrace.rollout.types import Message, Rollout, Task
from headrace.text.messages import untrained_reply
from tests.refusals import refused

TIC = "textarena:TicTacToe-v0"
FIRST_FREE = "tests.environments.adapters.games:first_free"


def first_free(messages: Sequence[Message]) -> str:
    from tests.environments.adapters.games import first_free

    return first_free(messages[-1]["content"], random.Random(0))


async def play_one(environment: Environment, answer: Any, seed: int = 0) -> list[Rollout]:
    return (await play(environment, Task("game", {"seed": seed}), answer))[0]


async def test_two_seats_of_one_policy_are_two_rollouts_with_rewards_of_their_own():
    zero, one = await play_one(load_environment(TIC, {}), first_free)
    # Taking the first free square in turns, 0 2 4 6 against 1 3 5: the diagonal 2 4 6 wins.
    assert [(rollout.agent, rollout.rewards["reward"], len(rollout.turns)) for rollout in (zero, one)] == [
        ("player_0", 1.0, 4),
        ("player_1", -1.0, 3),
    ]
    assert [message["content"] for message in zero.messages if message["role"] == "assistant"] == [
        "[0]",
        "[2]",
        "[4]",
        "[6]",
    ]
    assert zero.messages[0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
    assert zero.messages[2]["content"].startswith("Player 0 placed their symbol (O) in cell 0.\n")
    assert "[Player 1] [1]\nPlayer 1 placed their symbol (X) in cell 1." in zero.messages[2]["content"]


@pytest.mark.parametrize(("seed", "reward"), [(0, 1.0), (1, -1.0)])
async def test_against_an_opponent_the_seed_says_which_seat_is_trained(seed: int, reward: float):
    (rollout,) = await play_one(load_environment(TIC, {"opponent": FIRST_FREE}), first_free, seed)
    assert (rollout.agent, rollout.rewards) == ("policy", {"reward": reward})
    assert rollout.messages[0]["content"].startswith(f"You are Player {seed} in")


async def test_a_random_opponent_plays_by_the_rules():
    environment = load_environment(TIC, {"opponent": "random"})
    for seed in range(6):
        (rollout,) = await play_one(environment, first_free, seed)
        assert rollout.metrics["invalid_move"] == 0
        assert rollout.metrics["forfeited"] == 0


def test_a_random_move_is_one_of_those_shown_last():
    text = "For example, '[4]'.\n\nBoard\n\nAvailable Moves: '[0]', '[7]'"
    assert {random_move(text, random.Random(n)) for n in range(20)} == {"[0]", "[7]"}
    with pytest.raises(EpisodeError, match="no moves in brackets"):
        random_move("Say something.", random.Random(0))


async def test_moves_against_the_rules_lose():
    (zero,) = await play_one(load_environment(TIC, {}), lambda messages: "I resign")  # before the other has moved
    assert zero.rewards == {"reward": -1.0}
    assert zero.metrics["invalid_move"] == 1
    assert "attempted an invalid move" in zero.messages[2]["content"]


async def test_who_has_no_move_left_loses():
    zero, one = await play_one(load_environment(TIC, {"max_turns": 2}), first_free)
    assert (zero.rewards, one.rewards) == ({"reward": -1.0}, {"reward": 1.0})
    assert (zero.stop_reason, zero.metrics["forfeited"], one.metrics["forfeited"]) == ("max_turns", 1, 0)


async def test_a_reply_that_was_cut_off_is_no_move():
    def cut(messages: Sequence[Message]) -> Reply:
        return untrained_reply("[0]", raw="[0]", finish_reason="length")

    (zero,) = await play_one(load_environment(TIC, {}), cut)
    assert (zero.rewards, zero.truncated) == ({"reward": -1.0}, True)


async def test_a_game_that_breaks_down_over_a_move_is_lost(monkeypatch: pytest.MonkeyPatch):
    environment = load_environment(TIC, {})
    from textarena.envs.TicTacToe.env import TicTacToeEnv

    def broken(self: Any, action: str) -> Any:
        raise KeyError(action)

    monkeypatch.setattr(TicTacToeEnv, "step", broken)
    (zero,) = await play_one(environment, lambda messages: "[0]")
    assert zero.rewards == {"reward": -1.0}
    assert zero.metrics["game_crashed"] == 1


async def test_a_game_for_one_is_one_rollout():
    (rollout,) = await play_one(load_environment("textarena:GuessTheNumber-v0", {}), lambda messages: "[7]")
    assert rollout.agent == "policy"
    assert rollout.messages[0]["role"] == "user"
    with refused(key="args.opponent", value="random"):
        load_environment("textarena:GuessTheNumber-v0", {"opponent": "random"})


async def test_games_at_once_do_not_share_their_chances():
    environment = load_environment("textarena:KuhnPoker-v0", {})

    async def opening(seed: int) -> str:
        rollouts = await play_one(environment, lambda messages: "[check]", seed)
        return "".join(str(rollout.messages) for rollout in rollouts)

    alone = [await opening(seed) for seed in range(6)]
    random.seed(7)
    np.random.seed(7)
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert await asyncio.gather(*(opening(seed) for seed in range(6))) == alone
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    ("name", "words"), [("NoSuchGame-v0", ""), ("Taboo-v0", "AssertionError: Taboo game requires at least 4")]
)
def test_a_game_that_cannot_be_played_here_says_why(name: str, words: str):
    with refused(key="environment", value=f"textarena:{name}") as error:
        load_environment(f"textarena:{name}", {})
    assert words in error.value.fact


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with refused(key="environment", value=TIC) as error:
        load_environment(TIC, {})
    assert "headrace[textarena]" in error.value.fix
