"""First prompts as a model reads them, and their lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.tools.probe.report import (
    Exchange,
    LoadResult,
    OfferedTool,
    ProbeEpisode,
    ProbeReport,
    exchange_renderer,
    summarize_prompts,
)

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]
EXCHANGE = Exchange(ASKED, [], [*ASKED, {"role": "assistant", "content": "hi"}])


def report(*episodes: ProbeEpisode) -> ProbeReport:
    opening = LoadResult(0.1, 0.1, 0.1, 2, 100, False, "")
    return ProbeReport("probed", {}, opening, ["a", "b"], [0, 7], 0, None, list(episodes), [], None)


PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": PARAMETERS}}


def letters(exchange: Exchange) -> tuple[str, int, int]:
    """A stand-in for rendering: the letters of all texts."""
    prompt, whole = ("".join(m["content"] for m in messages) for messages in (exchange.prompt, exchange.conversation))
    return prompt, len(prompt), len(whole)


def test_tools_are_counted_as_the_chat_format_writes_them(tiny_model: Path):
    show = exchange_renderer(tiny_model, {})
    text, length, whole = show(Exchange(ASKED, [tool("press")], EXCHANGE.conversation))
    _, plain_length, plain_whole = show(EXCHANGE)
    assert '"name": "press"' in text
    assert "# Tools" in text  # the explanation around the definition is counted, too
    assert length - plain_length > len(json.dumps(tool("press")))
    assert length - plain_length == whole - plain_whole


def test_the_tools_of_all_tasks_are_listed_once_with_their_share():
    exchanges = [Exchange(ASKED, [tool(name) for name in names], ASKED) for names in (("a", "b"), ("b",))]
    episodes = [ProbeEpisode("gold", task, exchange=exchange) for task, exchange in zip((0, 7), exchanges, strict=True)]
    offered = summarize_prompts(report(*episodes), 1, letters, "model").tools
    assert offered == [OfferedTool("a", "Does it.", PARAMETERS, 0.5), OfferedTool("b", "Does it.", PARAMETERS, 1.0)]


def test_with_a_model_its_tokens_are_counted_and_its_format_is_seen(tiny_model: Path):
    text, length, whole = exchange_renderer(tiny_model, {"name": "qwen3", "enable_thinking": False})(EXCHANGE)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhéllo<|im_end|>\n")
    # Three tokens of format before the text and two after: <|im_start|> system \n ... <|im_end|> \n. Thoughts that are
    # over at once: <think> \n \n </think> \n \n, behind <|im_start|> assistant \n.
    assert length == 2 * 5 + 15 + 3 + 6
    assert whole == length + 2 + 2


def test_gold_conversations_are_counted_first_and_some_prompts_are_shown():
    short = Exchange(ASKED, [], ASKED)
    episodes = [
        ProbeEpisode("gold", 7, exchange=EXCHANGE),
        ProbeEpisode("empty", 7, exchange=short),
        ProbeEpisode("empty", 0, exchange=short),
    ]
    prompts = summarize_prompts(report(*episodes), 1, letters, "model")
    assert (prompts.lengths, prompts.conversation_lengths) == ([14, 14], [14, 16])
    assert [(shown.task, shown.key, shown.tokens) for shown in prompts.shown] == [(0, "a", 14)]


def test_the_prompts_that_are_shown_are_spread_over_the_tasks():
    played = list(range(0, 80, 10))
    episodes = [ProbeEpisode("gold", task, exchange=EXCHANGE) for task in played]
    given = report(*episodes)
    given.played, given.keys = played, list("abcdefgh")
    prompts = summarize_prompts(given, 3, letters, "model")
    assert [(shown.task, shown.key) for shown in prompts.shown] == [(0, "a"), (20, "c"), (50, "f")]
    assert len(prompts.lengths) == 8


def test_a_conversation_that_cannot_be_rendered_is_reported(tiny_model: Path):
    nameless = Exchange([{"content": "x"}], [], [])
    prompts = summarize_prompts(
        report(ProbeEpisode("gold", 0, exchange=nameless)), 3, exchange_renderer(tiny_model, {"name": "qwen3"}), "model"
    )
    assert prompts.problem.startswith("task 0: KeyError")
