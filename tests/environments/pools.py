"""Worker pools for tests, and the models that their episodes talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headrace.environments.base import Reply
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerLimits, WorkerPool
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Task, Turn
from tests.environments.worker_environments import NAME


class Echo:
    """A model that repeats the last message, in tokens that are its characters."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        text = f"echo {messages[-1]['content']}"
        tokens = [ord(letter) for letter in text]
        logprobs = [-1 / (n + 3) for n in range(len(tokens))]
        return Reply({"role": "assistant", "content": text}, Turn([1, 2], tokens, logprobs, [7] * len(tokens), 0.7))


class Broken(Exception):
    """What a model may raise."""


class Silent:
    """A model that never answers; it knows who has hung up."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.hung_up.set()


class Failing:
    def __init__(self) -> None:
        self.error = Broken("the engine is gone")

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        raise self.error


@asynccontextmanager
async def pool(
    size: int = 1, identifier: str = NAME, args: dict[str, Any] | None = None, **limits: Any
) -> AsyncIterator[WorkerPool]:
    environment = load_environment(identifier, args or {})
    workers = WorkerPool(environment, identifier, args or {}, size=size, limits=WorkerLimits(**limits))
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()


def task(do: str, **arguments: Any) -> Task:
    return Task("deeds", {"do": do, "with": arguments})
