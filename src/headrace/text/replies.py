"""Replies of a model as messages and tool calls, whether an engine sampled them or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.rollout.types import Message, Turn

INVALID_JSON = "the tool call is not valid JSON"
NO_NAME = "the tool call names no tool"
NOT_AN_OBJECT = "the arguments of a tool call must be a JSON object"
NOT_ENCODABLE = "the tool call has a number or a character that cannot be passed on"
"""Values of `ToolCall.error`, which the model reads as the result of its call."""


class ToolCall(msgspec.Struct):
    """One attempt of the model to call a tool; `error` is the reason why it cannot be run, or empty."""

    id: str
    name: str
    arguments: dict[str, Any]
    error: str = ""


class Reply(msgspec.Struct):
    """The model's reply to a conversation: a message, and the exact tokens of the turn."""

    message: Message
    turn: Turn
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    """Every attempted call, in order; the message contains only those that can be run."""
    raw: str = ""
    """The whole completion as text, with reasoning and markup."""

    @property
    def text(self) -> str:
        """The content of the message, without the line breaks that some chat formats put around it."""
        return str(self.message.get("content") or "").strip("\n")

    @property
    def truncated(self) -> bool:
        return self.turn.finish_reason == "length"


def untrained_reply(
    content: str, calls: Sequence[ToolCall] = (), *, raw: str, reasoning: str = "", finish_reason: str = "stop"
) -> Reply:
    """Build a reply without tokens, for a model that the run does not train."""
    empty = np.empty(0)
    turn = Turn(empty, empty, empty, empty, 1.0, finish_reason)
    return Reply(assistant_message(content, calls, reasoning), turn, list(calls), raw)


def assistant_message(content: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> Message:
    """Build an assistant message; calls with an error are left out."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    usable = [call for call in calls if not call.error]
    if usable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in usable
        ]
    return message


def checked_tool_call(call_id: str, name: Any, arguments: Any, error: str = "") -> ToolCall:
    """Build a tool call from parsed values, with `error` set if it cannot be run."""
    if not isinstance(name, str) or not is_encodable(name):
        name = ""
    if not error and not name:
        error = NO_NAME
    elif not error and not isinstance(arguments, dict):
        error = NOT_AN_OBJECT
    elif not error and not is_encodable(arguments):
        error = NOT_ENCODABLE
    return ToolCall(call_id, name, {} if error else arguments, error)


def is_encodable(value: Any) -> bool:
    """Return whether msgpack can encode a value: JSON may contain larger integers and lone surrogates."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True
