"""First questions as a model reads them, and their lengths."""

from __future__ import annotations

from pathlib import Path

from headrace.environments.probe.prompts import BYTES, in_bytes, in_tokens, prompts_of
from headrace.environments.probe.report import Episode, Exchange, Opening, Report

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]
EXCHANGE = Exchange(ASKED, [], [*ASKED, {"role": "assistant", "content": "hi"}])


def report(*episodes: Episode) -> Report:
    opening = Opening(0.1, 0.1, 0.1, 2, 100, False, "")
    return Report("probed", {}, opening, ["a", "b"], [0, 7], 0, None, list(episodes), [], None)


def test_without_a_model_the_bytes_of_all_texts_are_counted():
    text, length, whole = in_bytes(EXCHANGE)
    assert text == "system: Be brief.\nuser: héllo"
    assert (length, whole) == (9 + 6, 9 + 6 + 2)


def test_with_a_model_its_tokens_are_counted_and_its_format_is_seen(tiny_model: Path):
    text, length, whole = in_tokens(tiny_model, {"name": "qwen3", "enable_thinking": False})(EXCHANGE)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhéllo<|im_end|>\n")
    # Three tokens of format before the text and two after: <|im_start|> system \n ... <|im_end|> \n. Thoughts that are
    # over at once: <think> \n \n </think> \n \n, behind <|im_start|> assistant \n.
    assert length == 2 * 5 + 15 + 3 + 6
    assert whole == length + 2 + 2


def test_gold_conversations_are_counted_first_and_some_prompts_are_shown():
    short = Exchange(ASKED, [], ASKED)
    episodes = [
        Episode("gold", 7, exchange=EXCHANGE),
        Episode("empty", 7, exchange=short),
        Episode("empty", 0, exchange=short),
    ]
    prompts = prompts_of(report(*episodes), 1, in_bytes, BYTES)
    assert (prompts.lengths, prompts.conversation_lengths) == ([15, 15], [15, 17])
    assert [(shown.task, shown.key, shown.tokens) for shown in prompts.shown] == [(0, "a", 15)]


def test_the_prompts_that_are_shown_are_spread_over_the_tasks():
    played = list(range(0, 80, 10))
    episodes = [Episode("gold", task, exchange=EXCHANGE) for task in played]
    given = report(*episodes)
    given.played, given.keys = played, list("abcdefgh")
    prompts = prompts_of(given, 3, in_bytes, BYTES)
    assert [(shown.task, shown.key) for shown in prompts.shown] == [(0, "a"), (20, "c"), (50, "f")]
    assert len(prompts.lengths) == 8


def test_a_conversation_that_cannot_be_rendered_is_told(tiny_model: Path):
    nameless = Exchange([{"content": "x"}], [], [])
    prompts = prompts_of(
        report(Episode("gold", 0, exchange=nameless)), 3, in_tokens(tiny_model, {"name": "qwen3"}), "tokens"
    )
    assert prompts.problem.startswith("task 0: KeyError")
