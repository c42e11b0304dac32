"""A server that deals in words alone, as any that speaks OpenAI's chat completions: episodes reach it through here.

It tells no token ids. How long its replies were is what it says in `usage`, and is not known where it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.environments.base import Reply
from headrace.environments.openai_chat import chat, is_context_overflow
from headrace.errors import BadInput
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, OpenAIError
from headrace.inference.client.served_model import ServedModel, sampling_keys
from headrace.orchestrator.conversation import derive_seed
from headrace.rollout.types import Message

FAILED = "endpoint"
"""The reason of an episode that got no answer."""


async def find_model(urls: Sequence[str], api_key_var: str, wanted: str | None, patience: float) -> str:
    """What the servers call the model: the one that was asked for, or the only one they have."""
    if wanted is not None:
        return wanted
    probe = ServedModel("", urls, api_key_var=api_key_var, retry_for=patience)
    try:
        names = await probe.retry(probe.clients[0].models)
    except OpenAIError as error:
        address = probe.clients[0].address
        raise BadInput(
            f"the server has neither Headrace's interface nor OpenAI's: {error}", key="CHECKPOINT", value=address
        ) from error
    finally:
        await probe.close()
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise BadInput(
            f"{urls[0]} has {len(names)} models ({listed})",
            key="--endpoint-model",
            fix="Name one with --endpoint-model NAME.",
        )
    return names[0]


class WordsLine:
    """How episodes reach the servers. `tokens` has what each episode's replies took, as far as the servers say."""

    def __init__(self, model: ServedModel, sampling: Mapping[str, Any], seed: int | None) -> None:
        self.model = model
        self.max_tokens: int | None = sampling.get("max_tokens")
        self.keys = sampling_keys(**{key: value for key, value in sampling.items() if key != "max_tokens"})
        self.seed = seed
        self.tokens: dict[str, int | None] = {}
        """By the episode's name."""

    def open(self, session: str, episode: str) -> _Context:
        self.tokens[episode] = 0
        return _Context(self, episode)

    def close(self, session: str) -> None:
        """Nothing was opened for it."""


class _Context:
    """One episode's line."""

    def __init__(self, line: WordsLine, episode: str) -> None:
        self._line = line
        self._episode = episode
        self._asked = 0

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        self._asked += 1
        seed = self._line.seed
        own = {} if seed is None else {"seed": derive_seed(f"{seed}-{self._episode}-{self._asked}")}
        limits = [limit for limit in (self._line.max_tokens, max_tokens) if limit is not None]
        ask = partial(self._ask, list(tools), {**self._line.keys, **own}, min(limits, default=None))
        return await chat(ask, messages, tools, FAILED)

    async def _ask(
        self, tools: list[dict[str, Any]], extra: dict[str, Any], limit: int | None, sent: list[Message]
    ) -> ChatResponse:
        async def once(most: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(sent, tools=tools, max_tokens=most, extra=extra)

        try:
            answer = await self._line.model.call(partial(once, limit))
        except OpenAIError as error:
            if limit is None or not is_context_overflow(error):
                raise
            # Many refuse to be allowed more than they have room for: then what they have is the limit.
            answer = await self._line.model.call(partial(once, None))
        self._count(answer.usage.completion_tokens)
        return answer

    def _count(self, told: int) -> None:
        """A server that counts nothing says 0, or nothing."""
        known = self._line.tokens[self._episode]
        self._line.tokens[self._episode] = known + told if known is not None and told else None
