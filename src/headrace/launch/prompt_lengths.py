"""Measure the lengths of prompts and examples, in tokens, before a run starts.

An episode is run up to its first model call, which is recorded and never answered, so that system messages and tools
count. Left out on purpose: environments that implement `start()`, and later turns of a conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from renderers.base import Renderer

from headrace.environments.base import Environment, evenly_spaced
from headrace.rollout.types import Message, Sample, Task
from headrace.text.prompt import PromptRenderer
from headrace.trainer.sft_data import Example

Tool = dict[str, Any]

MAX_SAMPLED = 64
"""Tasks or examples that are measured, at most."""
MEASURE_S = 1.0
"""Time after which no further sample is measured."""
EPISODE_TIMEOUT_S = 5.0
"""Limit for the first model call of an episode, and for closing an environment."""


class NoModelCall(Exception):
    """An episode did not call the model. The message has the reason."""


def prompt_lengths(environment: Environment, tasks: Sequence[Task], renderer: Renderer) -> list[int]:
    """Return the number of tokens in the first prompts of evenly spaced tasks. Raises `NoModelCall`."""
    prompts = PromptRenderer(renderer)

    async def measure() -> list[int]:
        end = time.monotonic() + MEASURE_S
        lengths = []
        try:
            for place in evenly_spaced(len(tasks), MAX_SAMPLED):
                lengths.append(len(prompts.render(*await _first_call(environment, tasks[place])).ids))
                if time.monotonic() > end:
                    break
        finally:
            await asyncio.wait_for(environment.close(), EPISODE_TIMEOUT_S)
        return lengths

    return asyncio.run(measure())


def first_tools(environment: Environment, tasks: Sequence[Task]) -> dict[str, list[Tool]]:
    """Return the tools of the first model call by task key; none if the first task has none. Raises `NoModelCall`."""

    async def ask() -> dict[str, list[Tool]]:
        tools: dict[str, list[Tool]] = {}
        try:
            for task in tasks:
                tools[task.key] = (await _first_call(environment, task))[1]
                if not any(tools.values()):
                    break
        finally:
            await asyncio.wait_for(environment.close(), EPISODE_TIMEOUT_S)
        return tools

    return asyncio.run(ask())


def render_examples(examples: Iterable[Example], renderer: Renderer, seq_len: int) -> list[Sample]:
    """Return the first examples as the trainer will render them."""
    end = time.monotonic() + MEASURE_S
    samples: list[Sample] = []
    for example in islice(examples, MAX_SAMPLED):
        samples += example.samples(renderer, seq_len)
        if time.monotonic() > end:
            break
    return samples


class _RecordingContext:
    """A context that records the messages and tools of the first model call and never answers."""

    def __init__(self) -> None:
        self.call: asyncio.Future[tuple[list[Message], list[Tool]]] = asyncio.get_running_loop().create_future()

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *_: Any, **__: Any) -> Any:
        if not self.call.done():
            self.call.set_result((list(messages), list(tools)))
        await asyncio.Event().wait()
        raise AssertionError("the episode is cancelled while it waits")


async def _first_call(environment: Environment, task: Task) -> tuple[list[Message], list[Tool]]:
    context = _RecordingContext()
    episode = asyncio.ensure_future(environment.run(task, context))
    try:
        first: set[asyncio.Future[Any]] = {episode, context.call}
        await asyncio.wait(first, timeout=EPISODE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if context.call.done():
            return context.call.result()
        if not episode.done():
            raise NoModelCall(f"an episode did not call the model within {EPISODE_TIMEOUT_S:g} s")
        if (error := episode.exception()) is not None:
            reason = f"{type(error).__name__}: {error}"
            raise NoModelCall(f"an episode failed before it called the model: {reason}") from error
        raise NoModelCall("an episode ended without a model call")
    finally:
        episode.cancel()
        await asyncio.wait({episode}, timeout=EPISODE_TIMEOUT_S)
