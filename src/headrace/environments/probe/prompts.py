"""The questions that an environment asks, as a model reads them and counted in its tokens. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.probe.probing import spread
from headrace.environments.probe.report import Exchange, Prompts, Report, ShownPrompt
from headrace.rollout.types import Message

BYTES = "bytes of text"
Show = Callable[[Exchange], tuple[str, int, int]]
"""A first question's text, its length, and that of the whole conversation."""


def prompts_of(report: Report, examples: int, show: Show, counted_in: str) -> Prompts:
    """Of the tasks that were played; the text of `examples` of them, spread evenly."""
    exchanges = {episode.task: episode.exchange for episode in reversed(report.episodes) if episode.exchange}
    keys = dict(zip(report.played, report.keys, strict=True))
    prompts = Prompts(counted_in, [], [], [])
    tasks = sorted(exchanges)
    to_show = [tasks[place] for place in spread(len(tasks), examples)]
    for task in tasks:
        try:
            text, length, whole = show(exchanges[task])
        except Exception as error:  # chat templates raise what they like about messages they cannot render
            prompts.problem = f"task {task}: {type(error).__name__}: {error}"
            break
        prompts.lengths.append(length)
        prompts.conversation_lengths.append(whole)
        if task in to_show:
            prompts.shown.append(ShownPrompt(task, keys[task], text, length))
    return prompts


def in_bytes(exchange: Exchange) -> tuple[str, int, int]:
    """Without a model: the messages, and the bytes of their texts and tools. The tiny model's tokens are bytes."""
    text = "\n".join(f"{message.get('role', '')}: {_content(message)}" for message in exchange.prompt)
    tools = len(msgspec.json.encode(exchange.tools)) if exchange.tools else 0
    return text, tools + _bytes(exchange.prompt), tools + _bytes(exchange.conversation)


def in_tokens(directory: Path, renderer_options: dict[str, Any]) -> Show:
    """With a model's own tokenizer and renderer, which is chosen as a run would choose it."""
    from headrace.text.prompt import Prompts as Conversations
    from headrace.text.renderer import make_renderer
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **renderer_options)
    conversations = Conversations(renderer)

    def show(exchange: Exchange) -> tuple[str, int, int]:
        ids = conversations.render(exchange.prompt, exchange.tools).ids
        tools: Any = exchange.tools or None
        messages: Any = exchange.conversation
        return tokenizer.decode(ids), len(ids), len(renderer.render_ids(messages, tools=tools))

    return show


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _bytes(messages: Sequence[Message]) -> int:
    calls = sum(len(msgspec.json.encode(message["tool_calls"])) for message in messages if message.get("tool_calls"))
    return calls + sum(len(_content(message).encode(errors="replace")) for message in messages)
