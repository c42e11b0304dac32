"""The first prompts of an environment's tasks, as a model reads them and counted in its tokens. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.environments.base import evenly_spaced
from headrace.tools.probe.report import Exchange, OfferedTool, ProbeReport, Prompts, ShownPrompt

TINY = "tiny"
"""The tokenizer and chat format of `headrace init-model tiny`, in which a byte is a token."""
RenderExchange = Callable[[Exchange], tuple[str, int, int]]
"""Returns the text of the first prompt, its length, and the length of the whole conversation, in tokens."""


def summarize_prompts(report: ProbeReport, examples: int, render: RenderExchange, tokenizer: str) -> Prompts:
    """Return the lengths and tools of all tasks that ran, and the text of `examples` of them, spread evenly."""
    exchanges = {episode.task: episode.exchange for episode in reversed(report.episodes) if episode.exchange}
    keys = dict(zip(report.played, report.keys, strict=True))
    tasks = sorted(exchanges)
    tools: dict[str, OfferedTool] = {}
    for task in tasks:
        for function in (tool["function"] for tool in exchanges[task].tools):
            description = function.get("description", ""), function.get("parameters", {})
            tool = tools.setdefault(function["name"], OfferedTool(function["name"], *description))
            tool.share += 1 / len(exchanges)
    prompts = Prompts(tokenizer, [], [], [], list(tools.values()))
    shown_tasks = [tasks[index] for index in evenly_spaced(len(tasks), examples)]
    for task in tasks:
        try:
            text, length, conversation_length = render(exchanges[task])
        except Exception as error:  # chat templates may raise anything for messages that they cannot render
            prompts.problem = f"task {task}: {type(error).__name__}: {error}"
            break
        prompts.lengths.append(length)
        prompts.conversation_lengths.append(conversation_length)
        if task in shown_tasks:
            prompts.shown.append(ShownPrompt(task, keys[task], text, length))
    return prompts


def exchange_renderer(directory: Path, renderer_options: dict[str, Any]) -> RenderExchange:
    """Return a function that renders with a model directory's tokenizer and chat format, chosen as in a run."""
    from headrace.text.prompt import PromptRenderer
    from headrace.text.renderer import make_renderer
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    renderer = make_renderer(directory, tokenizer, **renderer_options)
    prompts = PromptRenderer(renderer)

    def render(exchange: Exchange) -> tuple[str, int, int]:
        ids = prompts.render(exchange.prompt, exchange.tools).ids
        tools: Any = exchange.tools or None
        messages: Any = exchange.conversation
        return tokenizer.decode(ids), len(ids), len(renderer.render_ids(messages, tools=tools))

    return render
