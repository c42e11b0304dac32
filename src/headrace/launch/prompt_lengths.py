"""How long the prompts and examples of a run are, measured on real ones before anything is started.

An environment's episode is run up to its first question to the model, which is recorded and never answered. So system
messages and tools count as the policy will read them. Left out on purpose: environments that open something in
`start()`, whose episodes may need it, and later turns of a conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from renderers.base import Renderer

from headrace.environments.base import Environment, Reply, evenly_spaced
from headrace.rollout.types import Message, Sample, Task
from headrace.text.prompt import PromptRenderer
from headrace.text.sft_conversation import SftConversation, render_sample

SAMPLED = 64
"""Tasks or examples that are measured, at most."""
MEASURE_S = 1.0
"""Seconds after which no further one is measured."""
EPISODE_S = 5.0
"""Seconds that an episode gets to ask its first question, and an environment to close."""


class Question(NamedTuple):
    """What an episode first asks the model."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class NoQuestion(Exception):
    """An episode did not ask the model anything. The message says what happened instead."""


def prompt_lengths(environment: Environment, tasks: Sequence[Task], renderer: Renderer) -> list[int]:
    """Return the tokens of the first prompts of some tasks, spread evenly. Raises `NoQuestion`."""
    prompts = PromptRenderer(renderer)

    def length(question: Question) -> int:
        return len(prompts.render(question.messages, question.tools).ids)

    return asyncio.run(_measure(environment, tasks, length))


def opens_something(environment: Environment) -> bool:
    """Whether episodes need what `start()` opens."""
    return type(environment).start is not Environment.start


def render_some(conversations: Iterable[SftConversation], renderer: Renderer) -> list[Sample]:
    """Return the first examples as the trainer will see them."""
    end = time.monotonic() + MEASURE_S
    samples = []
    for conversation in islice(conversations, SAMPLED):
        samples.append(render_sample(conversation, renderer))
        if time.monotonic() > end:
            break
    return samples


async def _measure(environment: Environment, tasks: Sequence[Task], length: Callable[[Question], int]) -> list[int]:
    end = time.monotonic() + MEASURE_S
    lengths = []
    try:
        for place in evenly_spaced(len(tasks), SAMPLED):
            lengths.append(length(await _question(environment, tasks[place])))
            if time.monotonic() > end:
                break
    finally:
        await asyncio.wait_for(environment.close(), EPISODE_S)
    return lengths


class _Listener:
    """A context that records the first question and leaves it open."""

    def __init__(self) -> None:
        self.question: asyncio.Future[Question] = asyncio.get_running_loop().create_future()

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        if not self.question.done():
            self.question.set_result(Question(list(messages), list(tools)))
        await asyncio.Event().wait()
        raise AssertionError("the episode is cancelled while it waits")


async def _question(environment: Environment, task: Task) -> Question:
    listener = _Listener()
    episode = asyncio.ensure_future(environment.run(task, listener))
    try:
        first: set[asyncio.Future[Any]] = {episode, listener.question}
        await asyncio.wait(first, timeout=EPISODE_S, return_when=asyncio.FIRST_COMPLETED)
        if listener.question.done():
            return listener.question.result()
        if not episode.done():
            raise NoQuestion(f"an episode did not ask the model anything within {EPISODE_S:g} s")
        if (error := episode.exception()) is not None:
            raise NoQuestion(f"an episode failed before it asked the model: {type(error).__name__}: {error}") from error
        raise NoQuestion("an episode ended without asking the model")
    finally:
        episode.cancel()
        await asyncio.wait({episode}, timeout=EPISODE_S)


def lost(samples: Iterable[Sample], seq_len: int) -> Iterator[Sample]:
    """Yield the examples of which nothing is left to learn within `seq_len`."""
    return (sample for sample in samples if not sample.mask[1:seq_len].any())
