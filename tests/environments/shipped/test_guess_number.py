"""Find a number by higher and lower."""

import pytest

from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import play
from headrace.environments.shipped.guess_number import GuessNumber
from headrace.rollout.types import Task
from tests.environments.shipped.games import HOSTILE, first_tasks, heard, play_gold, play_mistakes, play_replies, total
from tests.refusals import refused

TERSE = GuessNumber(terse=True)
SECRET = Task("game", {"number": 37})


async def test_a_game_as_it_is_played():
    rollout = await play_replies(TERSE, SECRET, "50", "25", "37")
    assert heard(rollout) == ["1-100", "lower", "higher"]
    assert rollout.rewards == {"found": 1.0, "speed": 0.5}
    assert rollout.metrics == {"turns": 3, "invalid": 0}
    assert rollout.stop_reason == "found"


async def test_more_guesses_than_halving_needs_lower_the_bonus():
    # 1 to 100 takes at most 7 guesses by halving; this one takes 9
    rollout = await play_replies(TERSE, SECRET, *"12345678", "37")
    assert rollout.rewards == {"found": 1.0, "speed": pytest.approx(0.5 * 7 / 9)}


async def test_a_number_that_is_not_found_earns_nothing():
    rollout = await play_replies(TERSE, SECRET, "36")
    assert rollout.rewards == {"found": 0.0, "speed": 0.0}
    assert rollout.metrics == {"turns": 10, "invalid": 0}  # 7 by halving, and 3 to spare
    assert rollout.stop_reason == "max_turns"


async def test_invalid_guesses_cost_a_turn_and_are_reported():
    rollout = await play_replies(
        GuessNumber(),
        SECRET,
        "37",
        "<guess>0</guess>",
        "<guess>101</guess>",
        "<guess>-37</guess>",
        "<guess>37.0</guess>",
        "<guess>36</guess><guess>37</guess>",
        "I think <guess> 37 </guess>!",
    )
    hint = "One guess, a whole number from 1 to 100, belongs between <guess> and </guess>."
    assert heard(rollout)[1:] == [hint] * 6
    assert rollout.rewards == {"found": 1.0, "speed": 0.5}
    assert rollout.metrics == {"turns": 7, "invalid": 6}


@pytest.mark.parametrize(("highest", "needed"), [(2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (100, 7)])
async def test_gold_halves_the_range_and_needs_no_more_than_that(highest: int, needed: int):
    environment = GuessNumber(highest=highest, num_tasks=highest)
    turns = []
    for task in first_tasks(environment, highest):
        rollout = await play_gold(environment, task)
        assert total(rollout) == 1.5
        turns.append(rollout.metrics["turns"])
    assert len(turns) == highest
    assert max(turns) == needed


async def test_gold_recovers_from_mistakes():
    said = iter(["<guess>99</guess>", "<guess>3</guess>", "nothing"])
    environment = GuessNumber()
    (rollout,), _ = await play(environment, SECRET, lambda past: next(said, None) or environment.gold(SECRET, past))
    assert rollout.rewards["found"] == 1


async def test_mistakes_never_find_it():
    for highest in (2, 100):
        environment = GuessNumber(highest=highest, terse=True)
        for task in first_tasks(environment, 10):
            rollout = await play_mistakes(environment, task)
            assert total(rollout) == 0
            assert rollout.metrics["invalid"] == 0


def test_tasks_are_distinct_numbers_of_the_range():
    numbers = [task["number"] for task in GuessNumber(highest=50).tasks()]
    assert sorted(numbers) == list(range(1, 51))
    assert len(GuessNumber(highest=10**9 - 1, num_tasks=5).tasks()) == 5
    assert GuessNumber(seed=1).tasks() == GuessNumber(seed=1).tasks()
    assert GuessNumber("train").tasks() != GuessNumber("eval").tasks()


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("environment", [GuessNumber(), TERSE])
async def test_hostile_replies_earn_nothing(environment, reply):
    rollout = await play_replies(environment, SECRET, reply)
    assert total(rollout) == 0
    assert rollout.metrics["invalid"] == 10


async def test_the_prompt_echoed_is_no_guess():
    for environment in (GuessNumber(), TERSE):
        for task in first_tasks(environment, 100):
            (prompt, *_) = heard(await play_gold(environment, task))
            assert total(await play_replies(environment, task, prompt)) == 0


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "dev"}, "split"),
        ({"highest": 1}, "highest"),
        ({"highest": 10**9}, "highest"),
        ({"max_guesses": 0}, "max_guesses"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"demonstrate_mistakes": "half"}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("guess-number", args)
