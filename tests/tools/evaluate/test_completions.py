"""An episode as a line, and the file of lines after a kill."""

from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.rollout.types import Rollout, RolloutError, Task, Turn
from headrace.tools.evaluate.completions import (
    Completion,
    CompletionsFile,
    Correctness,
    Thinking,
    counted_rollouts,
    make_completion,
)
from headrace.tools.evaluate.episodes import missing

THINKING = Thinking(lambda rollout: [bytes(turn.completion_ids.tolist()).decode() for turn in rollout.turns], len)
"""One token per letter."""


def rollout(text: str, **fields: object) -> Rollout:
    ids = list(text.encode())
    turn = Turn([1], ids, [0.0] * len(ids), [0] * len(ids), 1.0)
    made = Rollout(turns=[turn], messages=[{"role": "assistant", "content": text}])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def line(
    *rollouts: Rollout,
    correct: str | None = None,
    solved: float | None = None,
    tags: tuple[str, str] = ("<think>", "</think>"),
) -> Completion:
    tokens = sum(rollout.completion_tokens for rollout in counted_rollouts(rollouts))
    return make_completion("k", 0, rollouts, THINKING, tags, Correctness(correct, solved), tokens)


def test_an_answer_is_right_by_the_component_that_says_so_and_in_format_by_another():
    given = line(rollout("x", reward=1.1, rewards={"correct": 0.0, "format": 0.1, "style": 1.0}))
    assert (given.correct, given.in_format, given.reward) == (False, True, 1.1)
    assert line(rollout("x", reward=1.1, rewards={"correct": 0.0, "style": 1.0}), correct="style").correct


def test_without_such_a_component_the_whole_reward_must_be_one():
    assert line(rollout("x", reward=1.0, rewards={"exact": 1.0})).correct
    half = line(rollout("x", reward=0.5, rewards={"exact": 0.5}))
    assert (half.correct, half.in_format) == (False, None)


def test_a_threshold_is_of_the_whole_reward_or_of_what_is_named():
    parts = {"correct": 0.0, "style": 0.6}
    assert line(rollout("x", reward=0.6, rewards=parts), solved=0.5).correct
    assert not line(rollout("x", reward=0.6, rewards=parts), solved=0.5, correct="correct").correct
    assert line(rollout("x", reward=0.1, rewards=parts), solved=0.5, correct="style").correct


def test_a_component_that_nobody_reports_is_refused_with_those_that_are():
    with pytest.raises(BadInput) as error:
        line(rollout("x", reward=1.0, rewards={"style": 1.0}), correct="exact")
    assert (error.value.key, error.value.value) == ("--correct", "exact")
    assert error.value.fix is not None and "style" in error.value.fix


@pytest.mark.parametrize(
    ("text", "tokens", "words"),
    [
        ("<think>\nsix and two\n</think>\n8", 11, 3),
        ("<think>cut off", 7, 2),  # to the end
        ("no thoughts", None, None),
        ("<think></think>", 0, 0),
    ],
)
def test_thoughts_are_measured_in_tokens_and_words(text: str, tokens: int | None, words: int | None):
    given = line(rollout(text, reward=0.0))
    assert (given.tokens, given.thinking_tokens, given.thinking_words) == (len(text), tokens, words)


def test_thoughts_are_found_by_the_tags_that_were_asked_for():
    given = line(rollout("[reason]six and two[/reason]8", reward=0.0), tags=("[reason]", "[/reason]"))
    assert (given.thinking_tokens, given.thinking_words) == (11, 3)


def test_thoughts_that_the_renderer_separate_apart_count_where_there_are_no_tags():
    separate = rollout("8", reward=0.0)
    separate.messages[0]["reasoning_content"] = "six and two"
    assert line(separate).thinking_words == 3


def test_of_several_agents_those_that_are_trained_count_and_all_are_kept():
    first = rollout("a", agent="first", reward=1.0, rewards={"won": 1.0})
    second = rollout("bcd", agent="second", reward=0.0, rewards={"won": 0.0})
    guest = rollout("e", agent="guest", reward=9.0, trainable=False)
    given = line(first, second, guest)
    assert (given.reward, given.rewards, given.tokens) == (0.5, {"won": 0.5}, 4)
    assert list(given.conversations) == ["first", "second", "guest"]


def test_a_failed_episode_says_why():
    given = line(rollout("x", reward=1.0), Rollout(error=RolloutError("timeout", "longer than 3 s")))
    assert (given.correct, given.reward, given.error, given.detail) == (False, 0.0, "timeout", "longer than 3 s")


def test_half_a_line_after_a_kill_is_cut_off_and_failed_episodes_are_missing(tmp_path: Path):
    path = tmp_path / "m" / "completions.jsonl"
    file = CompletionsFile(path)
    for key, error in (("a", ""), ("b", "engine"), ("c", "")):
        file.append(Completion(key, 0, reward=1.0, error=error))
    file.close()
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    again = CompletionsFile(path)
    tasks = [Task("env", {}, key) for key in "abc"]
    assert missing(tasks, 1, again, together=False) == {"b": [0], "c": [0]}
    again.append(Completion("b", 0, reward=0.5))
    again.close()
    last = CompletionsFile(path)
    assert {key: episode.reward for (key, _), episode in last.scored.items()} == {"a": 1.0, "b": 0.5}
    assert missing(tasks, 1, last, together=False) == {"c": [0]}
    last.close()


def test_a_line_in_the_middle_that_is_no_episode_is_named(tmp_path: Path):
    path = tmp_path / "completions.jsonl"
    path.write_bytes(b'{"key": "a", "sample": 0}\n{"key": \n{"key": "b", "sample": 0}\n')
    with pytest.raises(BadInput) as error:
        CompletionsFile(path)
    assert (error.value.file, error.value.line) == (path, 2)
