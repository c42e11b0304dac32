"""An environment's line to a frozen model: it plays the episodes, and the policy learns to say the same.

The model's server returns text; `text/teacher_reply.py` rewrites it as the policy's tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
"""The reason of episodes that fail because of their teacher."""
WHOLE = ("stop", "tool_calls")
"""How servers say that a reply came to its own end."""
CUT = "length"


class FrozenSampler:
    """One per environment: the teacher, how to sample from it, and the policy's renderer.

    With a `seed` every request has one of its own, made of this one, its episode's name and what is asked. Long texts
    are rendered in threads, `pool_size` of them at once.
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
        """Sessions prefer nobody: the least busy server is asked."""
        return Conversation(self, session, episode)

    def close(self, session: str) -> None:
        """Nothing was opened for it."""

    async def reply(self, request: TurnRequest) -> Reply:
        """Return the teacher's reply as the policy would write it."""
        reply = await chat(partial(self._ask, request), request.messages, request.tools, TEACHER)
        rewrite = partial(self._rewriter.rewrite, reply, request.prompt, request.tools, request.first_call)
        try:
            return rewrite() if len(reply.raw) <= INLINE_CHARS else await self.prompter.run_in_pool(rewrite)
        except UntrainableReply as error:
            raise EpisodeError(TEACHER, str(error)) from error

    async def _ask(self, request: TurnRequest, sent: list[Message]) -> ChatResponse:
        extra = self._extra(request)

        async def once(limit: int | None, client: OpenAIClient) -> ChatResponse:
            return await client.chat(sent, tools=request.tools, max_tokens=limit, extra=extra)

        try:
            return _taught(await self._teacher.call(partial(once, request.limit_tokens(self._max_tokens))))
        except OpenAIError as error:
            if not is_context_overflow(error):
                raise
        # Many refuse to be allowed more than they have room for: then what they have is the limit.
        return _taught(await self._teacher.call(partial(once, None)))

    def _extra(self, request: TurnRequest) -> dict[str, Any]:
        seed = request.seed(self._seed)
        return self._sampling | ({} if seed is None else {"seed": seed})


def _taught(answer: ChatResponse) -> ChatResponse:
    """The answer, if it is one that somebody could learn from."""
    refusal = refusal_text(answer.message)
    if refusal:
        raise EpisodeError(TEACHER, f"the teacher refused to answer: {refusal:.200}")
    if answer.finish_reason not in (*WHOLE, CUT):
        raise EpisodeError(
            TEACHER,
            f"the teacher's server ended its reply with finish_reason {answer.finish_reason!r}, which is none of "
            f"{', '.join((*WHOLE, CUT))}: nobody should learn what it kept of it",
        )
    if (
        answer.finish_reason != CUT
        and not content_text(answer.message.get("content")).strip()
        and not answer.message.get("tool_calls")
    ):
        raise EpisodeError(TEACHER, "the teacher ended its reply without a text or a tool call")
    return answer
