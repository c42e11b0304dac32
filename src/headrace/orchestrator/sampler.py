"""Sampling of episodes from the policy: one engine request per turn, parsed into a reply."""

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
    """Samples the episodes of one environment from the engines.

    `cache_salt` separates prefix caches; the policy's salt changes with its weights. It is read at every request, so a
    turn after an update shares nothing with earlier turns of its conversation. During an update the salt may be the
    older one, so engines also separate cached blocks by weights themselves.

    `observe` is called with each prompt, completion and temperature and must not block. With a `seed`, each request
    has a seed derived from it, the name of the episode and the conversation. Long prompts are rendered in up to
    `pool_size` threads.
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
