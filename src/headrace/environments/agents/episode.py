"""One episode behind the proxy: calls the episode's context for an agent, and keeps the sampled turns."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from headrace.environments.agents.chat_completions import ChatRequest, Choice
from headrace.environments.agents.transcript import Transcript
from headrace.environments.base import Context, PromptTooLong
from headrace.inference.backend import InvalidRequest
from headrace.rollout.types import Message, Turn
from headrace.text.openai_messages import InvalidMessage, canonical_messages, replace_surrogates
from headrace.text.replies import assistant_message

TOKEN_BYTES = 18


class EpisodeOver(Exception):
    """A request after the end of its episode."""

    def __init__(self, why: str = "it has ended") -> None:
        super().__init__(f"this episode is over, {why}: further requests are neither answered nor counted")


class Episode:
    """The calls of one agent, from any number of clients at once. `token` is its part of the URL.

    With `describe_tools` false the agent's tools are not in the prompt, for a model that was trained to call them.
    """

    def __init__(self, context: Context, describe_tools: bool = True) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.transcript = Transcript()
        self.turns: list[Turn] = []
        self.calls = 0
        """Tool calls in its replies."""
        self.overflow: PromptTooLong | None = None
        """Set while the latest request did not fit into the context."""
        self.failure: Exception | None = None
        """Why the model gave no reply; the episode cannot be completed then."""
        self.failed = asyncio.Event()
        self._context = context
        self._describe_tools = describe_tools
        self._over = False
        self._pending: set[asyncio.Task[Any]] = set()

    async def reply(self, request: ChatRequest) -> list[Choice]:
        """Return the policy's replies to a request. Raises `InvalidRequest`, `PromptTooLong` or `EpisodeOver`."""
        if self._over or self.failed.is_set():
            raise EpisodeOver
        task = asyncio.current_task()
        assert task is not None
        self._pending.add(task)
        try:
            return await self._sample_all(request)
        except asyncio.CancelledError:
            if self._over:
                raise EpisodeOver from None
            raise
        finally:
            self._pending.discard(task)

    def close(self) -> None:
        """Refuse further requests and cancel pending ones."""
        self._over = True
        for task in self._pending:
            task.cancel()

    async def _sample_all(self, request: ChatRequest) -> list[Choice]:
        request.check()
        try:
            messages = self.transcript.restore(canonical_messages(request.messages))
        except InvalidMessage as error:
            raise InvalidRequest(str(error)) from error
        choices = [asyncio.ensure_future(self._sample(request, messages)) for _ in range(request.choices)]
        try:
            return await asyncio.gather(*choices)
        finally:
            for choice in choices:
                choice.cancel()

    async def _sample(self, request: ChatRequest, messages: list[Message]) -> Choice:
        tools = request.offered_tools
        try:
            reply = await self._context.chat(messages, tools if self._describe_tools else [], request.token_limit)
        except PromptTooLong as error:
            self.overflow = error
            raise
        except Exception as error:
            self.failure = self.failure or error
            self.failed.set()
            raise EpisodeOver(f"since the model gave no reply ({type(error).__name__})") from error
        self.overflow = None
        self.turns.append(reply.turn)
        visible, usable = reply.message, [call for call in reply.tool_calls if not call.error]
        if tools and not self._describe_tools and usable:  # the message has the calls as text
            visible = assistant_message("", usable, reply.message.get("reasoning_content", ""))
        visible = replace_surrogates(visible)
        call_ids = self.transcript.record(messages, reply.message, visible)
        self.calls += len(call_ids)
        return Choice(reply, visible, call_ids)
