"""A conversation with the model: messages, turns, tool calls, and its end.

Tokens are the context's concern: it continues the exact tokens of the last turn where the chat format allows that, and
renders the conversation again where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.environments.base import Context, PromptTooLong, Reply
from headrace.environments.tools import Tool, is_plain, run_call
from headrace.rollout.types import Message, Rollout, Turn


class Chat:
    """One agent's part of an episode. `tools` are functions with type hints; `max_turns` limits its replies.

    With `describe_tools` false the tools are not in the prompt, for a model that was trained to call them anyway.

    ```
    chat = Chat(context, "Guess a number from 1 to 10.", max_turns=5)
    while reply := await chat.reply():
        ...
        chat.say("Higher.")
    return [chat.rollout({"found": 1.0})]
    ```
    """

    def __init__(
        self,
        context: Context,
        prompt: str | Sequence[Message] = (),
        *,
        system: str | None = None,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        describe_tools: bool = True,
        max_turns: int | None = None,
        agent: str = "policy",
        trainable: bool = True,
    ) -> None:
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.stop_reason = ""
        """Why the conversation ended: "truncated", "context_full", "max_turns", or the argument of `stop`."""
        self._context = context
        self._tools: dict[str, Tool] = {}
        for tool in (each if isinstance(each, Tool) else Tool(each) for each in tools):
            if self._tools.setdefault(tool.name, tool) is not tool:
                raise TypeError(f"two tools have the name {tool.name}")
        self._schemas = [tool.schema for tool in self._tools.values()] if describe_tools else []
        self._max_turns = max_turns
        self._agent = agent
        self._trainable = trainable
        self._metrics: dict[str, float] = {"tool_calls": 0, "tool_errors": 0} if tools else {}
        self._last: Reply | None = None
        if system is not None:
            self.say(system, role="system")
        if isinstance(prompt, str):
            self.say(prompt)
        else:
            self.messages += prompt

    @property
    def text(self) -> str:
        """The text of the last reply; empty before the first."""
        return self._last.text if self._last is not None else ""

    def say(self, content: str, role: str = "user") -> None:
        """Add a message for the model to read."""
        self.messages.append({"role": role, "content": content})

    def stop(self, reason: str) -> None:
        """End the conversation: `reply` returns None from now on."""
        self.stop_reason = self.stop_reason or reason

    async def reply(self, max_tokens: int | None = None) -> Reply | None:
        """Return the model's next reply; None once the conversation is over.

        A truncated reply is the last one. A conversation without room for a reply within `seq_len` ends; for the first
        reply, `PromptTooLong` is raised.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        if self._max_turns is not None and len(self.turns) >= self._max_turns:
            self.stop("max_turns")
        if self.stop_reason:
            return None
        try:
            reply = await self._context.chat(self.messages, self._schemas, max_tokens)
        except PromptTooLong:
            if not self.turns:
                raise
            self.stop("context_full")
            return None
        self.messages.append(reply.message)
        self.turns.append(reply.turn)
        self._last = reply
        if reply.truncated:
            self.stop("truncated")
        return reply

    async def act(self, max_tokens: int | None = None) -> Reply | None:
        """Run the tool calls of replies until one has none; return it, or None if the conversation ended first."""
        while reply := await self.reply(max_tokens):
            if not reply.tool_calls:
                return reply
            if not self.stop_reason:
                await self.run_tools(reply)
        return None

    async def run_tools(self, reply: Reply) -> None:
        """Run the tool calls of a reply, one after another, and add their results as messages."""
        for call in reply.tool_calls:
            content, succeeded = await run_call(self._tools, call)
            self._metrics["tool_calls"] = self._metrics.get("tool_calls", 0) + 1
            self._metrics["tool_errors"] = self._metrics.get("tool_errors", 0) + (not succeeded)
            message = {"role": "tool", "tool_call_id": call.id, "content": content}
            self.messages.append(message | ({"name": call.name} if is_plain(call.name) else {}))

    def rollout(self, rewards: Mapping[str, float], metrics: Mapping[str, float] | None = None) -> Rollout:
        """Return the conversation as a rollout with these rewards."""
        return Rollout(
            agent=self._agent,
            trainable=self._trainable,
            rewards=dict(rewards),
            metrics={**self._metrics, **(metrics or {})},
            messages=self.messages,
            turns=self.turns,
            truncated=self.stop_reason in ("truncated", "context_full"),
            stop_reason=self.stop_reason,
        )
