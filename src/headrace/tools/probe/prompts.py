"""The questions that an environment asks, as a model reads them and counted in its tokens. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.environments.base import evenly_spaced
from headrace.tools.probe.report import Exchange, OfferedTool, Prompts, Report, ShownPrompt

TINY = "tiny"
"""The tokenizer and chat format of `headrace init-model tiny`, in which a byte is a token."""
Show = Callable[[Exchange], tuple[str, int, int]]
"""A first question's text, its length, and that of the whole conversation."""


def prompts_of(report: Report, examples: int, show: Show, tokenizer: str) -> Prompts:
    """Return the lengths and tools of the tasks that were played; the text of `examples` of them, spread evenly."""
    exchanges = {episode.task: episode.exchange for episode in reversed(report.episodes) if episode.exchange}
    keys = dict(zip(report.played, report.keys, strict=True))
    tasks = sorted(exchanges)
    prompts = Prompts(tokenizer, [], [], [], offered_tools([exchanges[task] for task in tasks]))
    to_show = [tasks[place] for place in evenly_spaced(len(tasks), examples)]
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


def offered_tools(exchanges: Sequence[Exchange]) -> list[OfferedTool]:
    """Return the tools of all first questions, one of each name."""
    offered: dict[str, OfferedTool] = {}
    for exchange in exchanges:
        for function in (tool["function"] for tool in exchange.tools):
            described = function.get("description", ""), function.get("parameters", {})
            tool = offered.setdefault(function["name"], OfferedTool(function["name"], *described))
            tool.share += 1 / len(exchanges)
    return list(offered.values())


def in_tokens(directory: Path, renderer_options: dict[str, Any]) -> Show:
    """Render with the tokenizer and chat format of a model directory, chosen as a run would choose them."""
    from headrace.text.prompt import PromptRenderer
    from headrace.text.renderer import make_renderer
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **renderer_options)
    conversations = PromptRenderer(renderer)

    def show(exchange: Exchange) -> tuple[str, int, int]:
        ids = conversations.render(exchange.prompt, exchange.tools).ids
        tools: Any = exchange.tools or None
        messages: Any = exchange.conversation
        return tokenizer.decode(ids), len(ids), len(renderer.render_ids(messages, tools=tools))

    return show
