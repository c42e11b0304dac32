"""An environment's line to the model: messages to tokens, one request to the engine, tokens to a message."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.environments.base import PromptTooLong, Reply
from headrace.inference.client import Completion, EngineClient
from headrace.inference.schema import SamplingParams
from headrace.rollout.types import Message, Turn

KEPT_PROMPTS = 16
"""Rendered prompts that are kept: the episodes of a group start one after another and ask the same."""


class Sampler:
    """One per environment: the engines, the renderer, and how to sample.

    `cache_salt` separates what the engines' prefix caches may share: a live policy's changes with its weights, that of
    a frozen model never does. `observe` sees each prompt and what came of it, with the temperature; it must not wait.
    With a `seed` every request has one of its own, made of this one, its episode's name and what is asked.
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
        observe: Callable[[list[int], Completion, float], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._seq_len = seq_len
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._max_tokens = max_tokens
        self._cache_salt = cache_salt
        self._observe = observe
        self._seed = seed
        self._stop_token_ids = list(renderer.get_stop_token_ids())
        self._prompts: dict[bytes, list[int]] = {}

    def open(self, session: str, episode: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def chat(self, messages: Sequence[Message], session: str | None = None, name: str = "") -> Reply:
        """`name` tells this turn from all others of the run."""
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
                seed=None if self._seed is None else seed_of(f"{self._seed}-{name}"),
            ),
            cache_salt=self._cache_salt(),
            session=session,
        )
        if self._observe is not None:
            self._observe(prompt_ids, completion, self._temperature)
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
            None if completion.truncated_logprobs is None else np.array(completion.truncated_logprobs, np.float32),
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

    def __init__(self, sampler: Sampler, session: str, episode: str) -> None:
        self._sampler = sampler
        self._session = session
        self._episode = episode
        self._asked: Counter[bytes] = Counter()

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """Several may be under way at once: what is asked, not when, tells one from another."""
        question = hashlib.blake2b(msgspec.json.encode(messages), digest_size=16).digest()
        self._asked[question] += 1
        name = f"{self._episode}-{question.hex()}-{self._asked[question]}"
        return await self._sampler.chat(messages, self._session, name)


def seed_of(name: str) -> int:
    """A seed that engines take, 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
