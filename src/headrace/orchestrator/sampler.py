"""Sampling of an environment's episodes, turn by turn: from the policy's engines, or from a frozen model (a teacher).

The teacher's server returns text; `text/teacher_reply.py` rewrites it as the policy's tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.environments.base import EpisodeError, Reply
from headrace.environments.openai_chat import chat, is_context_overflow
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, OpenAIError
from headrace.inference.client.served_model import ServedModel, sampling_keys, structured_keys
from headrace.inference.schema import Completion, SamplingParams, StructuredOutputs
from headrace.orchestrator.conversation import INLINE_CHARS, Conversation, Prompter, TurnRequest
from headrace.rollout.types import Message, Turn
from headrace.text.messages import assistant_message, content_text, refusal_text
from headrace.text.prompt import Prompt
from headrace.text.teacher_reply import TeacherReplyRewriter, UntrainableReply
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

INLINE_TOKENS = 4096
"""Replies up to this length are parsed on the event loop, longer ones in a thread."""
TEACHER = "teacher"
"""Error reason of episodes that fail because of their teacher."""
FINISH_REASONS = ("stop", "tool_calls", "length")
"""Values of `finish_reason` of replies that are trained on; after `length` a reply is truncated."""


class Sampler:
    """Samples the episodes of one environment from the engines. `sampling` are fields of `SamplingParams`.

    `cache_salt` separates prefix caches; the policy's salt changes with its weights. It is read at every request, so a
    turn after an update shares nothing with earlier turns of its conversation. During an update the salt may be the
    older one, so engines also separate cached blocks by weights themselves.

    Tokens that are trained on (`trains`) are sampled without the masks of structured outputs: the trainer computes
    their logprobs without one.

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
        cache_salt: Callable[[], str | None] = lambda: None,
        observe: Callable[[list[int], Completion, float], None] | None = None,
        seed: int | None = None,
        pool_size: int = 1,
        trains: bool = False,
        **sampling: Any,
    ) -> None:
        self.prompter = Prompter(renderer, tokenizer, seq_len, pool_size)
        self._client, self._cache_salt, self._observe = client, cache_salt, observe
        self._seed, self._trains = seed, trains
        self._has_warned = False
        self._params = SamplingParams(**sampling, stop_token_ids=self.prompter.parser.stop_token_ids)

    def open(self, session: str, episode: str) -> Conversation:
        self._client.join(session)
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        self._client.leave(session)

    async def reply(self, request: TurnRequest) -> Reply:
        """Sample a reply from an engine."""
        limit, seed = request.limit_tokens(self._params.max_tokens), request.seed(self._seed)
        structured = self._allowed_structured_outputs(request)
        completion = await self._client.generate(
            request.prompt.ids,
            msgspec.structs.replace(self._params, max_tokens=limit, seed=seed, structured_outputs=structured),
            cache_salt=self._cache_salt(),
            session=request.session,
        )
        if self._observe is not None:
            self._observe(request.prompt.ids, completion, self._params.temperature)
        if structured is not None:
            text = self.prompter.parser.text(completion.token_ids)
            return Reply(assistant_message(text), self._build_turn(request.prompt, completion), [], text)
        sequence = request.prompt.ids, completion.token_ids
        parse = partial(self.prompter.parser.parse, *sequence, request.tools, request.first_call)
        is_short = len(completion.token_ids) <= INLINE_TOKENS
        message, tool_calls, raw = parse() if is_short else await asyncio.to_thread(parse)
        return Reply(message, self._build_turn(request.prompt, completion), tool_calls, raw)

    def _allowed_structured_outputs(self, request: TurnRequest) -> StructuredOutputs | None:
        """Return the structured outputs of a request; None, with a warning, where the reply cannot follow them."""
        if request.structured_outputs is None or not (self._trains or request.tools):
            return request.structured_outputs
        if not self._has_warned:
            self._has_warned = True
            reason = "a reply that follows them cannot call the tools that are offered"
            if self._trains:
                reason = "the policy is trained on logprobs of its whole distribution, not of a masked one"
            log.warning("an environment sets structured outputs: ignored, since %s", reason)
        return None

    def _build_turn(self, prompt: Prompt, completion: Completion) -> Turn:
        truncated = completion.truncated_logprobs
        return Turn(
            prompt.array,
            np.array(completion.token_ids, np.int32),
            np.array(completion.logprobs, np.float32),
            completion.steps,
            self._params.temperature,
            completion.finish_reason,
            None if truncated is None else np.array(truncated, np.float32),
            prompt.roles,
            completion.latents,
            routes=completion.routes,
        )


class FrozenSampler:
    """Samples the episodes of one environment from a teacher, rendered for the policy.

    With a `seed`, each request has a seed derived from it, the name of the episode and the conversation. Long texts
    are rendered in up to `pool_size` threads.
    """

    def __init__(
        self,
        teacher: ServedModel,
        renderer: Renderer,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int | None = None,
        pool_size: int = 1,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> None:
        self.prompter = Prompter(renderer, tokenizer, seq_len, pool_size)
        self._rewriter = TeacherReplyRewriter(renderer, tokenizer, seq_len)
        self._teacher, self._max_tokens, self._seed = teacher, max_tokens, seed
        self._sampling = sampling_keys(**sampling)

    def open(self, session: str, episode: str) -> Conversation:
        """Return the context of an episode. Requests go to the least busy server, whatever the session."""
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        """Do nothing: `open` has no state."""

    async def reply(self, request: TurnRequest) -> Reply:
        """Return the teacher's reply as the policy would write it."""
        reply = await chat(partial(self._request, request), request.messages, request.tools, TEACHER)
        rewrite = partial(self._rewriter.rewrite, reply, request.prompt, request.tools, request.first_call)
        try:
            return rewrite() if len(reply.raw) <= INLINE_CHARS else await self.prompter.run_in_pool(rewrite)
        except UntrainableReply as error:
            raise EpisodeError(TEACHER, str(error)) from error

    async def _request(self, request: TurnRequest, messages: list[Message]) -> ChatResponse:
        """Request the reply from the teacher's server; again without `max_tokens` if that exceeds its context."""
        seed = request.seed(self._seed)
        extra = self._sampling | ({} if seed is None else {"seed": seed}) | structured_keys(request.structured_outputs)

        async def send(limit: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(messages, tools=request.tools, max_tokens=limit, extra=extra)

        try:
            return _check_response(await self._teacher.call(partial(send, request.limit_tokens(self._max_tokens))))
        except OpenAIError as error:
            if not is_context_overflow(error):
                raise
        # Many servers refuse a max_tokens beyond their context length: without one, that length is the limit.
        return _check_response(await self._teacher.call(partial(send, None)))


def _check_response(response: ChatResponse) -> ChatResponse:
    """Return a response that can be trained on; raise `EpisodeError` for another one."""
    refusal = refusal_text(response.message)
    if refusal:
        raise EpisodeError(TEACHER, f"the teacher refused to answer: {refusal:.200}")
    if response.finish_reason not in FINISH_REASONS:
        raise EpisodeError(
            TEACHER,
            f"the teacher's server ended its reply with finish_reason {response.finish_reason!r}, which is not one of "
            f"{', '.join(FINISH_REASONS)}: the reply may be incomplete",
        )
    is_empty = not content_text(response.message.get("content")).strip() and not response.message.get("tool_calls")
    if is_empty and response.finish_reason != "length":
        raise EpisodeError(TEACHER, "the teacher ended its reply without a text or a tool call")
    return response
