"""An environment's line to the model: messages to tokens, one request to the engine, tokens to a message."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.base import Renderer

from headrace.environments.base import Reply
from headrace.inference.client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.rollout.types import Message, Turn


class PromptTooLong(Exception):
    """The conversation leaves no room for an answer within `seq_len`."""


class Sampler:
    """One per environment: the engine, the renderer, and how to sample."""

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        seq_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens: int | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._seq_len = seq_len
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._max_tokens = max_tokens
        self._stop_token_ids = list(renderer.get_stop_token_ids())

    async def chat(self, messages: Sequence[Message]) -> Reply:
        prompt_ids = list(self._renderer.render_ids(list(messages), add_generation_prompt=True))
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
                logprobs=1,
            ),
        )
        parsed = self._renderer.parse_response(completion.token_ids, prompt_ids=prompt_ids)
        message: Message = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        turn = Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=[version.step for version in completion.versions],
            temperature=self._temperature,
            finish_reason=completion.finish_reason,
        )
        return Reply(message, turn)
