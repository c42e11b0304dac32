"""An environment's line to the policy: one request to the engine, and its tokens as a reply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from renderers.base import Renderer

from headrace.environments.base import Reply
from headrace.inference.client.completion import Completion
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.conversation import Conversation, Prompter, TurnRequest, run_inline_or_in_thread
from headrace.rollout.types import Turn
from headrace.text.prompt import Prompt
from headrace.text.tokenizer import Tokenizer

INLINE_TOKENS = 4096
"""Replies up to this length are parsed on the event loop, longer ones in a thread."""


class Sampler:
    """One per environment: the engines, the renderer, and how to sample.

    `cache_salt` separates what the engines' prefix caches may share: a live policy's changes with its weights. It is
    asked for at every request, so that a turn after an update shares nothing with those before it, although its
    conversation is the same and stays with its engine. While an update is on its way the salt may be the older one:
    engines therefore tell the weights of what they cache apart themselves, whatever the salt.

    `observe` sees each prompt and what came of it, with the temperature; it must not wait. With a `seed` every request
    has one of its own, made of this one, its episode's name and what is asked. Long prompts are rendered in threads,
    `pool_size` of them at once.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        tokenizer: Tokenizer,
        seq_len: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        max_tokens: int | None = None,
        cache_salt: Callable[[], str | None] = lambda: None,
        observe: Callable[[list[int], Completion, float], None] | None = None,
        seed: int | None = None,
        pool_size: int = 1,
    ) -> None:
        self.prompter = Prompter(renderer, tokenizer, seq_len, pool_size)
        self._client = client
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._min_p = min_p
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._observe = observe
        self._seed = seed

    def open(self, session: str, episode: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def reply(self, request: TurnRequest) -> Reply:
        """Sample a reply from an engine."""
        completion = await self._client.generate(
            request.prompt.ids,
            SamplingParams(
                temperature=self._temperature,
                top_p=self._top_p,
                top_k=self._top_k,
                min_p=self._min_p,
                max_tokens=request.limit_tokens(self._max_tokens),
                stop_token_ids=self.prompter.parser.stop_token_ids,
                seed=request.seed(self._seed),
            ),
            cache_salt=self._cache_salt(),
            session=request.session,
        )
        if self._observe is not None:
            self._observe(request.prompt.ids, completion, self._temperature)
        message, tool_calls, raw = await run_inline_or_in_thread(
            len(completion.token_ids) <= INLINE_TOKENS,
            self.prompter.parser.parse,
            request.prompt.ids,
            completion.token_ids,
            request.tools,
            request.first_call,
        )
        return Reply(message, self._turn(request.prompt, completion), tool_calls, raw)

    def _turn(self, prompt: Prompt, completion: Completion) -> Turn:
        truncated = completion.truncated_logprobs
        return Turn(
            prompt.array,
            np.array(completion.token_ids, np.int32),
            np.array(completion.logprobs, np.float32),
            completion.steps,
            self._temperature,
            completion.finish_reason,
            None if truncated is None else np.array(truncated, np.float32),
            prompt.roles,
        )
