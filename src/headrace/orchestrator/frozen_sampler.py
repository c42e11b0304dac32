"""Sampling of episodes from a frozen model (a teacher), whose replies the policy learns.

The teacher's server returns text; `text/teacher_reply.py` rewrites it as the policy's tokens.
"""

from __future__ import annotations

from functools import partial

from renderers.base import Renderer

from headrace.environments.base import EpisodeError, Reply
from headrace.environments.openai_chat import chat, is_context_overflow
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, OpenAIError
from headrace.inference.client.served_model import ServedModel, sampling_keys
from headrace.orchestrator.conversation import INLINE_CHARS, Conversation, Prompter, TurnRequest
from headrace.rollout.types import Message
from headrace.text.openai_messages import content_text, refusal_text
from headrace.text.teacher_reply import TeacherReplyRewriter, UntrainableReply
from headrace.text.tokenizer import Tokenizer

TEACHER = "teacher"
"""Error reason of episodes that fail because of their teacher."""
COMPLETE = ("stop", "tool_calls")
"""Values of `finish_reason` of complete replies."""
TRUNCATED = "length"


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
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        pool_size: int = 1,
    ) -> None:
        self.prompter = Prompter(renderer, tokenizer, seq_len, pool_size)
        self._rewriter = TeacherReplyRewriter(renderer, tokenizer, seq_len)
        self._teacher = teacher
        self._sampling = sampling_keys(temperature, top_p, top_k, min_p)
        self._max_tokens = max_tokens
        self._seed = seed

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
        seed = request.seed(self._seed)
        extra = self._sampling | ({} if seed is None else {"seed": seed})

        async def send(limit: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(messages, tools=request.tools, max_tokens=limit, extra=extra)

        try:
            return _checked(await self._teacher.call(partial(send, request.limit_tokens(self._max_tokens))))
        except OpenAIError as error:
            if not is_context_overflow(error):
                raise
        # Many servers refuse a max_tokens beyond their context length: without one, that length is the limit.
        return _checked(await self._teacher.call(partial(send, None)))


def _checked(answer: ChatResponse) -> ChatResponse:
    """Return the answer if it can be trained on; raise `EpisodeError` otherwise."""
    refusal = refusal_text(answer.message)
    if refusal:
        raise EpisodeError(TEACHER, f"the teacher refused to answer: {refusal:.200}")
    if answer.finish_reason not in (*COMPLETE, TRUNCATED):
        raise EpisodeError(
            TEACHER,
            f"the teacher's server ended its reply with finish_reason {answer.finish_reason!r}, which is not one of "
            f"{', '.join((*COMPLETE, TRUNCATED))}: the reply may be incomplete",
        )
    if (
        answer.finish_reason != TRUNCATED
        and not content_text(answer.message.get("content")).strip()
        and not answer.message.get("tool_calls")
    ):
        raise EpisodeError(TEACHER, "the teacher ended its reply without a text or a tool call")
    return answer
