"""Kuhn's poker as it is played: both seats by one policy, or one of them against a fixed player."""

from collections.abc import Sequence
from itertools import product

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import demonstrate, play
from headrace.environments.shipped import kuhn_poker as kuhn
from headrace.environments.shipped.kuhn_poker import KuhnPoker
from headrace.rollout.types import Rollout, Task
from tests.environments.shipped.games import HOSTILE, heard
from tests.refusals import refused

TERSE = KuhnPoker(terse=True)
WORDY = KuhnPoker()


async def play_out(environment: KuhnPoker, data: dict, *replies: str) -> list[Rollout]:
    said = iter(replies)
    rollouts, script = await play(environment, Task("game", data), lambda messages: next(said))
    assert len(script.calls) == len(replies)
    return rollouts


def chips(rollouts: Sequence[Rollout]) -> list[float]:
    return [rollout.rewards["chips"] for rollout in rollouts]


async def test_a_deal_as_both_seats_see_it():
    first, second = await play_out(TERSE, {"deal": "QK"}, "p", "b", "b")
    assert (first.agent, second.agent) == ("player_0", "player_1")
    assert heard(first) == ["Q", "b"]
    assert heard(second) == ["Kp"]
    assert chips([first, second]) == [-2, 2]
    assert first.metrics == second.metrics == {"illegal": 0}


async def test_words_for_larger_models():
    rollouts = await play_out(
        WORDY, {"deal": "KJ"}, "Let me see. <action> Check </action>", "<action>bet</action>", "<action>call</action>"
    )
    assert chips(rollouts) == [2, -2]
    assert "You hold the king. You begin." in heard(rollouts[0])[0]
    assert heard(rollouts[0])[1] == (
        "Your opponent bets. Write <action>fold</action>, or <action>call</action> for one more chip."
    )
    assert "You hold the jack. Your opponent checks." in heard(rollouts[1])[0]


@pytest.mark.parametrize("environment", [TERSE, WORDY])
async def test_every_way_to_play_every_deal_is_paid_by_the_rules_and_sums_to_zero(environment: KuhnPoker):
    for deal in kuhn.DEALS:
        for history in ("pp", "pbp", "pbb", "bp", "bb"):
            replies = [environment.write(action, history[:place]) for place, action in enumerate(history)]
            won = chips(await play_out(environment, {"deal": deal}, *replies))
            assert won == [kuhn.winnings(deal, history), -kuhn.winnings(deal, history)]


@pytest.mark.parametrize("environment", [TERSE, WORDY])
async def test_a_situation_is_the_conversation_that_is_played(environment: KuhnPoker):
    for deal, history in product(kuhn.DEALS, ("pbp", "bp")):
        replies = iter(environment.write(action, history[:place]) for place, action in enumerate(history))
        asked = []

        def answer(messages, asked=asked, replies=replies):
            asked.append(list(messages))
            return next(replies)

        await play(environment, Task("game", {"deal": deal}), answer)
        places = [history[:count] for count in range(len(history))]
        assert asked == [environment.situation(deal[kuhn.seat_to_act(place)] + place) for place in places]


async def test_an_illegal_action_forfeits_two_chips_and_is_counted():
    (alone,) = await play_out(TERSE, {"deal": "KJ"}, "x")  # the other seat never came to act
    assert (alone.agent, alone.rewards, alone.metrics) == ("player_0", {"chips": -2}, {"illegal": 1})
    first, second = await play_out(TERSE, {"deal": "KJ"}, "b", "fold")
    assert chips([first, second]) == [2, -2]
    assert [rollout.metrics["illegal"] for rollout in (first, second)] == [0, 1]
    first, second = await play_out(WORDY, {"deal": "KJ"}, "<action>check</action>", "<action>fold</action>")
    assert chips([first, second]) == [2, -2]  # no bet yet, so there is nothing to fold


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("environment", [TERSE, WORDY])
async def test_hostile_replies_lose(environment: KuhnPoker, reply: str):
    (rollout,) = await play_out(environment, {"deal": "KJ"}, reply)
    assert rollout.rewards == {"chips": -2}


async def test_against_a_fixed_player_only_the_policys_seat_is_a_rollout():
    environment = KuhnPoker(terse=True, opponent="random")
    lucky, unlucky = [0.0, 0.0], [0.9, 0.9]  # the opponent bets below a half
    (rollout,) = await play_out(environment, {"deal": "QK", "seat": 0, "luck": lucky}, "p", "p")
    assert (rollout.agent, rollout.rewards) == ("player_0", {"chips": -1})
    (rollout,) = await play_out(environment, {"deal": "QK", "seat": 0, "luck": unlucky}, "b")
    assert rollout.rewards == {"chips": 1}
    (rollout,) = await play_out(environment, {"deal": "QK", "seat": 1, "luck": [0.9, 0.1]}, "b")
    assert (rollout.agent, rollout.rewards) == ("player_1", {"chips": 2})  # it passed, and then called


async def test_perfect_play_against_a_perfect_player_is_worth_what_the_game_is():
    rounds = 400
    environment = KuhnPoker(terse=True, opponent="nash", rounds=rounds)
    tasks = tasks_of(environment, "game")
    assert len(tasks) == rounds * 12
    won = {0: 0.0, 1: 0.0}
    for task in tasks:
        (rollout,), _ = await play(environment, task, lambda messages, task=task: TERSE.gold(task, messages))
        won[task.data["seat"]] += rollout.rewards["chips"]
    # Whatever an equilibrium may do is as good as the rest of it, so its likelier actions alone will do here.
    assert won[0] / (6 * rounds) == pytest.approx(-1 / 18, abs=0.07)
    assert won[1] / (6 * rounds) == pytest.approx(1 / 18, abs=0.07)


async def test_gold_against_a_fixed_player_wins_the_most_that_the_task_allows():
    environment = KuhnPoker(terse=True, opponent="random", rounds=4)
    for task in tasks_of(environment, "game"):
        (best,), _ = await play(environment, task, lambda messages, task=task: environment.gold(task, messages))
        others = []
        for actions in product("pb", repeat=2):
            said = iter(actions)
            (rollout,), _ = await play(environment, task, lambda messages, said=said: next(said))
            others.append(rollout.rewards["chips"])
        assert best.rewards["chips"] == max(others)


def test_the_opponents_luck_is_the_same_for_the_same_seed():
    args = {"opponent": "random", "rounds": 2}
    assert KuhnPoker(**args).tasks() == KuhnPoker(**args).tasks()
    assert KuhnPoker(**args).tasks() != KuhnPoker(**args, seed=1).tasks()
    assert KuhnPoker(**args).tasks() != KuhnPoker("eval", **args).tasks()


def test_demonstrations_with_half_of_them_mistakes_are_legal_play_at_random():
    environment = KuhnPoker(terse=True, demonstrate_mistakes=0.5)
    shown = demonstrate(environment, seed=0)
    decisions: dict[tuple[str, ...], list[str]] = {}
    for _ in range(3000):
        said = next(shown).messages
        for place in range(1, len(said), 2):
            observed = tuple(message["content"] for message in said[:place] if message["role"] == "user")
            decisions.setdefault(observed, []).append(said[place]["content"])
    assert len(decisions) == 12
    for actions in decisions.values():
        assert set(actions) == {"p", "b"}
        assert actions.count("b") / len(actions) == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "dev"}, "split"),
        ({"opponent": "me"}, "opponent"),
        ({"rounds": 0}, "rounds"),
        ({"terse": 1}, "terse"),
        ({"demonstrate_mistakes": 2}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("kuhn-poker", args)
