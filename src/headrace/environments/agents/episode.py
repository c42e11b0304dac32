"""One episode's side of the proxy: it asks the episode's context on behalf of an agent, and keeps what was sampled."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from headrace.environments.agents.replies import Answer
from headrace.environments.agents.requests import ChatRequest
from headrace.environments.agents.transcript import Transcript
from headrace.environments.base import Context, PromptTooLong, Reply
from headrace.inference.backend import InvalidRequest
from headrace.rollout.types import Message, Turn
from headrace.text.openai_messages import InvalidMessage, canonical_messages, replace_surrogates
from headrace.text.replies import assistant_message

TOKEN_BYTES = 18


class EpisodeOver(Exception):
    """An agent asks after the end of its episode."""

    def __init__(self, why: str = "it has ended") -> None:
        super().__init__(f"this episode is over, {why}: nothing that is asked now is answered or counted")


class Episode:
    """The calls of one agent, from any number of clients at once. `token` is its part of the address.

    With `describe_tools` false the model is not told of the agent's tools, for one that was trained to call them.
    """

    def __init__(self, context: Context, describe_tools: bool = True) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.transcript = Transcript()
        self.turns: list[Turn] = []
        self.calls = 0
        """Tool calls in its replies."""
        self.overflow: PromptTooLong | None = None
        """Set while the last thing that was asked left no room for an answer."""
        self.failure: Exception | None = None
        """Why the model gave no answer. The episode cannot be told to its end then."""
        self.failed = asyncio.Event()
        self._context = context
        self._describe_tools = describe_tools
        self._over = False
        self._asking: set[asyncio.Task[Any]] = set()

    async def answer(self, request: ChatRequest) -> list[Answer]:
        """The policy's replies to a request. Raises `InvalidRequest`, `PromptTooLong` or `EpisodeOver`."""
        if self._over or self.failed.is_set():
            raise EpisodeOver
        asking = asyncio.current_task()
        assert asking is not None
        self._asking.add(asking)
        try:
            return await self._ask(request)
        except asyncio.CancelledError:
            if self._over:
                raise EpisodeOver from None
            raise
        finally:
            self._asking.discard(asking)

    def close(self) -> None:
        """Answer nothing from now on; what is under way is given up."""
        self._over = True
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, request: ChatRequest) -> list[Answer]:
        request.check()
        try:
            messages = self.transcript.restored(canonical_messages(request.messages))
        except InvalidMessage as error:
            raise InvalidRequest(str(error)) from error
        asked = [asyncio.ensure_future(self._ask_once(request, messages)) for _ in range(request.choices)]
        try:
            return await asyncio.gather(*asked)
        finally:
            for choice in asked:
                choice.cancel()

    async def _ask_once(self, request: ChatRequest, messages: list[Message]) -> Answer:
        tools = request.shown_tools
        try:
            reply = await self._context.chat(messages, tools if self._describe_tools else [], request.most_tokens)
        except PromptTooLong as error:
            self.overflow = error
            raise
        except Exception as error:
            self.failure = self.failure or error
            self.failed.set()
            raise EpisodeOver(f"since the model gave no answer ({type(error).__name__})") from error
        self.overflow = None
        self.turns.append(reply.turn)
        seen = replace_surrogates(reply.message if self._describe_tools or not tools else _with_calls(reply))
        ids = self.transcript.record(messages, reply.message, seen)
        self.calls += len(ids)
        return Answer(reply, seen, ids)


def _with_calls(reply: Reply) -> Message:
    """What a reply says to somebody who knows tools that the model was not told of: to the model its calls are text."""
    usable = [call for call in reply.tool_calls if not call.error]
    return assistant_message("", usable, reply.message.get("reasoning_content", "")) if usable else reply.message
