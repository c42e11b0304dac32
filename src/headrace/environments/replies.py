"""Replies as messages and tool calls, whoever gave them, and those that no engine of ours sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.environments.base import Reply, ToolCall
from headrace.rollout.types import Message, Turn

NO_JSON = "the tool call is not valid JSON"
NOT_CLOSED = "the tool call is not closed"
NO_NAME = "the tool call names no tool"
MALFORMED = "the tool call is malformed"
NO_OBJECT = "the arguments of a tool call must be a JSON object"
NOT_PORTABLE = "the tool call has a number or a character that cannot be passed on"
"""What a model is told about a call that cannot be run."""


def untrained_reply(
    content: str, calls: Sequence[ToolCall] = (), *, raw: str, thought: str = "", finish_reason: str = "stop"
) -> Reply:
    """As a sampled one would be, without tokens: a call that cannot be run is in `tool_calls`, not in the message."""
    nothing = np.empty(0)
    turn = Turn(nothing, nothing, nothing, nothing, 1.0, finish_reason)
    return Reply(message_of(content, calls, thought), turn, list(calls), raw)


def message_of(content: str, calls: Sequence[ToolCall] = (), thought: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    usable = [call for call in calls if not call.error]
    if usable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in usable
        ]
    return message


def tool_call(identity: str, name: Any, arguments: Any, error: str = "") -> ToolCall:
    """A call as somebody read it, with the reason why it cannot be run, if it cannot."""
    named = name if isinstance(name, str) and _is_portable(name) else ""
    if not error and not named:
        error = NO_NAME
    elif not error and not isinstance(arguments, dict):
        error = NO_OBJECT
    elif not error and not _is_portable(arguments):
        error = NOT_PORTABLE
    return ToolCall(identity, named, {} if error else arguments, error)


def _is_portable(value: Any) -> bool:
    """Whether it can go to another process: Python reads integers of any size from JSON, and halves of characters."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return False
    return True
