"""Find a word of five letters."""

import itertools

import pytest

from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.shipped.wordle import Wordle, accepted_words, feedback, secret_words
from headrace.rollout.types import Task
from tests.environments.shipped.games import HOSTILE, first_tasks, heard, play_gold, play_mistakes, play_replies, total
from tests.refusals import refused

CRANE = Task("game", {"word": "crane"})


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("build", "storm", "XXXXX"),
        ("nacre", "crane", "YYYYG"),
        ("speed", "abide", "XXYXY"),  # one e in the word, so only the first of the guess counts
        ("speed", "erase", "YXYYX"),
        ("speed", "steal", "GXGXX"),  # the e in its place takes the only one
        ("speed", "crepe", "XYGYX"),
        ("allay", "loyal", "XYYGY"),  # the only a is the one in its place; both l's are elsewhere
        ("geese", "eagle", "YYXXG"),  # two e's in the word: one in its place, one elsewhere
        ("eerie", "there", "YXYXG"),
    ],
)
def test_feedback_counts_each_letter_of_the_word_once(guess: str, secret: str, marks: str):
    assert feedback(guess, secret) == marks


def test_feedback_agrees_with_an_independent_count():
    """A letter has as many G and Y together as both words have of it; G where they agree, Y from the left."""
    for guess, secret in itertools.product(secret_words()[::29], secret_words()[::31]):
        marks = feedback(guess, secret)
        for letter in set(guess):
            places = [place for place in range(5) if guess[place] == letter]
            green = [place for place in places if secret[place] == letter]
            rest = [place for place in places if place not in green]
            yellow = rest[: min(guess.count(letter), secret.count(letter)) - len(green)]
            for place in places:
                assert marks[place] == ("G" if place in green else "Y" if place in yellow else "X")


async def test_a_game_as_it_is_played():
    rollout = await play_replies(
        Wordle(), CRANE, "Let me begin with <guess>Nacre</guess>.", "<guess> crane\n</guess>", "<guess>slate</guess>"
    )
    rules, report = heard(rollout)
    assert "You have 6 guesses" in rules
    assert report == "n a c r e\nY Y Y Y G\n5 guesses left."
    assert rollout.rewards == {"solved": 1.0, "partial": pytest.approx(0.2), "format": pytest.approx(0.1)}
    assert rollout.metrics == {"turns": 2, "invalid": 0}
    assert rollout.stop_reason == "solved"


async def test_without_the_word_the_last_guess_gets_partial_credit():
    rollout = await play_replies(Wordle(terse=True), CRANE, "build", "storm", "nacre")
    assert rollout.rewards == {"solved": 0.0, "partial": pytest.approx(0.2 * (1 + 4 / 2) / 5), "format": 0.1}
    assert rollout.metrics == {"turns": 6, "invalid": 0}
    assert rollout.stop_reason == "max_turns"
    assert heard(rollout) == ["?????", "XXXXX", "XXXYX", "YYYYG", "YYYYG", "YYYYG"]


async def test_invalid_guesses_cost_a_turn_and_are_reported():
    rollout = await play_replies(
        Wordle(max_guesses=5),
        CRANE,
        "<guess>zzzzz</guess>",
        "<guess>cranes</guess>",
        "crane",
        "<guess>crane</guess> or <guess>crate</guess>",
        "<guess>cr4ne</guess>",
    )
    known = "zzzzz is not a known word."
    form = "One guess, a word of five letters, belongs between <guess> and </guess>."
    assert heard(rollout)[1:] == [known, form, form, form]
    assert rollout.rewards == {"solved": 0.0, "partial": 0.0, "format": 0.0}
    assert rollout.metrics == {"turns": 5, "invalid": 5}


async def test_a_last_guess_that_is_no_word_has_no_partial_credit():
    rollout = await play_replies(Wordle(terse=True, max_guesses=2), CRANE, "nacre", "crann")
    assert rollout.rewards == {"solved": 0.0, "partial": 0.0, "format": pytest.approx(0.05)}


def test_words_are_five_small_letters_and_answers_are_distinct():
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in accepted_words())
    assert len(set(secret_words())) == len(secret_words()) > 900
    assert {"words", "games", "liked", "crane", "aback"} <= accepted_words()


def test_no_word_is_asked_for_in_both_splits_whatever_the_seeds():
    train = {task["word"] for task in Wordle("train", seed=1).tasks()}
    evaluation = {task["word"] for task in Wordle("eval", seed=2).tasks()}
    assert len(train) > 700
    assert len(evaluation) > 60
    assert train.isdisjoint(evaluation)
    assert train | evaluation <= set(secret_words())


def test_tasks_depend_on_the_seed_alone():
    assert Wordle(seed=3).tasks() == Wordle(seed=3).tasks()
    assert Wordle(seed=3).tasks() != Wordle(seed=4).tasks()


@pytest.mark.parametrize("environment", [Wordle(), Wordle(terse=True), Wordle(max_guesses=1)])
async def test_gold_earns_everything_and_mistakes_less(environment):
    for task in first_tasks(environment):
        assert total(await play_gold(environment, task)) == pytest.approx(1.3)
        mistaken = await play_mistakes(environment, task)
        assert mistaken.rewards["solved"] == 0
        assert mistaken.metrics["turns"] == environment.max_guesses


async def test_gold_guesses_fit_all_that_is_known():
    environment = Wordle(terse=True)
    for task in first_tasks(environment):
        guesses = [m["content"] for m in (await play_gold(environment, task)).messages if m["role"] == "assistant"]
        for earlier, later in itertools.combinations(guesses, 2):
            assert feedback(earlier, later) == feedback(earlier, task.data["word"])


async def test_gold_needs_more_than_one_guess_like_anyone():
    turns = [(await play_gold(Wordle(), task)).metrics["turns"] for task in first_tasks(Wordle())]
    assert 3 <= sum(turns) / len(turns) <= 6


@pytest.mark.parametrize("reply", HOSTILE)
@pytest.mark.parametrize("environment", [Wordle(), Wordle(terse=True)])
async def test_hostile_replies_earn_nothing(environment, reply):
    rollout = await play_replies(environment, CRANE, reply)
    assert total(rollout) == 0
    assert max(map(len, heard(rollout))) < 1000


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "test"}, "split"),
        ({"max_guesses": 0}, "max_guesses"),
        ({"num_tasks": 1.5}, "num_tasks"),
        ({"terse": 1}, "terse"),
        ({"demonstrate_mistakes": -0.1}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("wordle", args)
