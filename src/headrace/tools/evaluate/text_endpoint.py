"""Episodes on servers that have only OpenAI chat completions, without token ids.

The length of replies comes from `usage`; it is unknown if the server does not report it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.environments.base import Reply
from headrace.environments.openai_chat import chat, is_context_overflow
from headrace.errors import BadInput
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, OpenAIError
from headrace.inference.client.served_model import ServedModel, sampling_keys, structured_keys
from headrace.inference.schema import StructuredOutputs
from headrace.orchestrator.conversation import derive_seed
from headrace.rollout.types import Message

FAILED = "endpoint"
"""Reason of an episode whose request failed."""


async def find_model(urls: Sequence[str], api_key_var: str, wanted: str | None, retry_for: float) -> str:
    """Return `wanted`, or the name of the only model of the servers."""
    if wanted is not None:
        return wanted
    probe = ServedModel("", urls, api_key_var=api_key_var, retry_for=retry_for)
    try:
        names = await probe.retry(probe.clients[0].models)
    except OpenAIError as error:
        address = probe.clients[0].address
        raise BadInput(
            f"the server has neither the Headrace API nor the OpenAI API: {error}", key="CHECKPOINT", value=address
        ) from error
    finally:
        await probe.close()
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise BadInput(
            f"{urls[0]} has {len(names)} models ({listed})",
            key="--endpoint-model",
            fix="Set --endpoint-model NAME.",
        )
    return names[0]


class TextContexts:
    """Makes the contexts of episodes, and counts the tokens of their replies as the servers report them."""

    def __init__(self, model: ServedModel, sampling: Mapping[str, Any], seed: int | None) -> None:
        self.model = model
        self.max_tokens: int | None = sampling.get("max_tokens")
        self.keys = sampling_keys(**{key: value for key, value in sampling.items() if key != "max_tokens"})
        self.seed = seed
        self.tokens: dict[str, int | None] = {}
        """By episode name; None if a reply had no usage."""

    def open(self, session: str, episode: str) -> _Context:
        self.tokens[episode] = 0
        return _Context(self, episode)

    def close(self, session: str) -> None:
        """Sessions hold no resources."""


class _Context:
    """The context of one episode."""

    def __init__(self, contexts: TextContexts, episode: str) -> None:
        self._contexts = contexts
        self._episode = episode
        self._requests = 0

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self._requests += 1
        seed = self._contexts.seed
        own = {} if seed is None else {"seed": derive_seed(f"{seed}-{self._episode}-{self._requests}")}
        limits = [limit for limit in (self._contexts.max_tokens, max_tokens) if limit is not None]
        extra = {**self._contexts.keys, **own, **structured_keys(structured_outputs)}
        request = partial(self._request, list(tools), extra, min(limits, default=None))
        return await chat(request, messages, tools, FAILED)

    async def _request(
        self, tools: list[dict[str, Any]], extra: dict[str, Any], limit: int | None, messages: list[Message]
    ) -> ChatResponse:
        async def send(max_tokens: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(messages, tools=tools, max_tokens=max_tokens, extra=extra)

        try:
            response = await self._contexts.model.call(partial(send, limit))
        except OpenAIError as error:
            if limit is None or not is_context_overflow(error):
                raise
            # Many servers reject a limit above the remaining context: retry without a limit.
            response = await self._contexts.model.call(partial(send, None))
        total, tokens = self._contexts.tokens[self._episode], response.usage.completion_tokens
        # A server without usage reports 0.
        self._contexts.tokens[self._episode] = total + tokens if total is not None and tokens else None
        return response
