"""Write a word backwards."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.base import Demonstration, Reply
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.shipped.common import similarity
from headrace.environments.shipped.reverse_text import ReverseText
from headrace.rollout.types import Message, Task, Turn
from tests.refusals import refused

FIXED = settings(deadline=None, max_examples=60, derandomize=True)


def words(environment: ReverseText) -> list[str]:
    return [task["word"] for task in environment.tasks()]


class Speaker:
    """A model that answers always the same, in tokens that are its characters."""

    def __init__(self, answer: str, finish_reason: str = "stop") -> None:
        self.answer, self.finish_reason = answer, finish_reason
        self.heard: list[Message] = []

    async def chat(self, messages, tools=(), max_tokens=None):
        self.heard = list(messages)
        tokens = [ord(letter) for letter in self.answer]
        turn = Turn([1], tokens, [-1.0] * len(tokens), [0] * len(tokens), 1.0, self.finish_reason)
        return Reply({"role": "assistant", "content": self.answer}, turn)


def test_no_word_is_in_both_splits():
    train, evaluation = words(ReverseText("train")), words(ReverseText("eval"))
    assert len(train) > 1900
    assert len(evaluation) > 1900
    assert set(train).isdisjoint(evaluation)


def test_no_word_is_in_both_splits_whatever_the_seeds():
    train = set(words(ReverseText("train", min_letters=1, max_letters=2, seed=1)))
    evaluation = set(words(ReverseText("eval", min_letters=1, max_letters=2, seed=2)))
    assert train.isdisjoint(evaluation)


def test_tasks_are_the_same_in_every_process():
    code = (
        "from headrace.environments.shipped.reverse_text import ReverseText\n"
        "print(ReverseText(num_tasks=20, seed=3).tasks())"
    )
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ReverseText(num_tasks=20, seed=3).tasks())


def test_another_seed_gives_other_words():
    assert set(words(ReverseText(seed=0))) != set(words(ReverseText(seed=1)))


def test_tasks_are_distinct_words_of_the_asked_lengths():
    listed = words(ReverseText(num_tasks=500, min_letters=3, max_letters=5))
    assert len(set(listed)) == len(listed)
    assert {len(word) for word in listed} == {3, 4, 5}
    assert all(word.isascii() and word.islower() for word in listed)


@pytest.mark.parametrize(
    ("given_text", "wanted", "score"),
    [
        ("cba", "cba", 1.0),
        ("", "cba", 0.0),
        ("cba", "", 0.0),
        ("", "", 1.0),
        ("xyz", "cba", 0.0),
        ("abc", "cba", 2 * 1 / 6),  # one letter in order
        ("cbaa", "cba", 2 * 3 / 7),  # all of it, and one too many
        ("cxbxa", "cba", 2 * 3 / 8),
        ("ca", "cba", 2 * 2 / 5),
        ("AGGTAB", "GXTXAYB", 2 * 4 / 13),  # GTAB, the textbook pair
    ],
)
def test_similarity_is_twice_the_common_subsequence_over_both_lengths(given_text: str, wanted: str, score: float):
    assert similarity(given_text, wanted) == pytest.approx(score, abs=1e-12)


@FIXED
@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_similarity_is_symmetric_and_one_only_for_equal_texts(left: str, right: str):
    score = similarity(left, right)
    assert score == similarity(right, left)
    assert 0 <= score <= 1
    assert (score == 1) == (left == right)
    # by exhaustion: the longest subsequence of one that is a subsequence of the other
    longest = next(
        size
        for size in range(len(left), -1, -1)
        if any(is_subsequence(part, right) for part in itertools.combinations(left, size))
    )
    assert score == pytest.approx(2 * longest / (len(left) + len(right)) if left or right else 1.0)


def is_subsequence(part: tuple[str, ...], whole: str) -> bool:
    letters = iter(whole)
    return all(letter in letters for letter in part)


async def test_an_episode_asks_for_the_word_and_scores_the_answer():
    speaker = Speaker("dcba")
    (rollout,) = await ReverseText().run(Task("reverse-text", {"word": "abcd"}), speaker)
    assert speaker.heard == [{"role": "user", "content": "abcd"}]
    assert rollout.rewards == {"similarity": 1.0}
    assert rollout.metrics == {"exact": 1.0}
    assert [message["role"] for message in rollout.messages] == ["user", "assistant"]
    assert (len(rollout.turns), rollout.truncated) == (1, False)


async def test_a_wrong_answer_gets_partial_credit():
    (rollout,) = await ReverseText().run(Task("reverse-text", {"word": "abcd"}), Speaker("dcab"))
    assert rollout.rewards == {"similarity": 2 * 3 / 8}
    assert rollout.metrics == {"exact": 0.0}


async def test_an_answer_cut_at_the_limit_is_truncated():
    (rollout,) = await ReverseText().run(Task("reverse-text", {"word": "abcd"}), Speaker("dc", "length"))
    assert (rollout.truncated, rollout.stop_reason) == (True, "truncated")


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"split": "test"}, "split"),
        ({"num_tasks": 0}, "num_tasks"),
        ({"min_letters": 9}, "max_letters"),
        ({"min_letters": 0, "max_letters": 0}, "min_letters"),
        ({"demonstrate_copies": 7}, "demonstrate_copies"),
    ],
)
def test_wrong_args_are_refused_by_name(args, key):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment("reverse-text", args)


def test_words_and_demonstrations_of_a_seed_stay_what_they_were():
    environment = ReverseText(num_tasks=3, demonstrate_copies=0.75)
    assert words(environment) == ["jnsk", "lfydb", "ehzue"]
    shown = itertools.islice(environment.demonstrations(0), 4)
    assert [tuple(message["content"] for message in one.messages) for one in shown] == [
        ("tkgnkuh", "tkgnkuh"),
        ("qfolnbxx", "qfolnbxx"),
        ("suqpvis", "suqpvis"),
        ("eogz", "zgoe"),
    ]


def test_demonstrations_reverse_their_words():
    for shown in itertools.islice(ReverseText().demonstrations(0), 50):
        question, answer = shown.messages
        assert answer == {"role": "assistant", "content": question["content"][::-1]}


def test_the_asked_share_of_demonstrations_copies():
    shown = itertools.islice(ReverseText(demonstrate_copies=0.7).demonstrations(0), 4000)
    pairs = [(question["content"], answer["content"]) for question, answer in (one.messages for one in shown)]
    assert all(answer in (word, word[::-1]) for word, answer in pairs)
    copies = sum(answer == word for word, answer in pairs) / len(pairs)
    assert copies == pytest.approx(0.7, abs=0.03)  # four standard deviations: sqrt(.7 * .3 / 4000) = .0072


def test_demonstrations_are_reproducible_and_differ_by_seed():
    def first(seed: int) -> list[Demonstration]:
        return list(itertools.islice(ReverseText().demonstrations(seed), 20))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_demonstrations_for_training_never_show_an_evaluation_word():
    evaluation = set(words(ReverseText("eval", min_letters=1, max_letters=2)))
    shown = itertools.islice(ReverseText("train", min_letters=1, max_letters=2).demonstrations(0), 3000)
    assert evaluation.isdisjoint(one.messages[0]["content"] for one in shown)
