"""An environment's line to the model: messages to tokens, one request to the engine, tokens to a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.environments.base import PromptTooLong, Reply
from headrace.inference.client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.rollout.types import Message, Turn

KEPT_PROMPTS = 16
"""Rendered prompts that are kept: the episodes of a group start one after another and ask the same."""


class Sampler:
    """One per environment: the engines, the renderer, and how to sample.

    `cache_salt` separates what the engines' prefix caches may share: a live policy's changes with its weights, that of
    a frozen model never does.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        seq_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens: int | None = None,
        cache_salt: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._seq_len = seq_len
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._stop_token_ids = list(renderer.get_stop_token_ids())
        self._prompts: dict[bytes, list[int]] = {}

    def open(self, session: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def chat(self, messages: Sequence[Message], session: str | None = None) -> Reply:
        prompt_ids = self._render(messages)
        room = self._seq_len - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(f"the conversation has {len(prompt_ids)} tokens and seq_len is {self._seq_len}")
        completion = await self._client.generate(
            prompt_ids,
            SamplingParams(
                temperature=self._temperature,
                top_p=self._top_p,
                top_k=self._top_k,
                max_tokens=min(room, self._max_tokens or room),
                stop_token_ids=self._stop_token_ids,
            ),
            cache_salt=self._cache_salt(),
            session=session,
        )
        parsed = self._renderer.parse_response(completion.token_ids, prompt_ids=prompt_ids)
        message: Message = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        turn = Turn(
            np.array(prompt_ids, np.int32),
            np.array(completion.token_ids, np.int32),
            np.array(completion.logprobs, np.float32),
            completion.steps,
            self._temperature,
            completion.finish_reason,
        )
        return Reply(message, turn)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        key = msgspec.json.encode(messages)
        if key not in self._prompts:
            if len(self._prompts) == KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = list(self._renderer.render_ids(list(messages), add_generation_prompt=True))
        return self._prompts[key]


class Conversation:
    """A sampler on behalf of one session."""

    def __init__(self, sampler: Sampler, session: str) -> None:
        self._sampler = sampler
        self._session = session

    async def chat(self, messages: Sequence[Message]) -> Reply:
        return await self._sampler.chat(messages, self._session)
