"""Replies that no engine of ours sampled: what was said and called, without tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.environments.base import Reply, ToolCall
from headrace.rollout.types import Message, Turn


def untrained_reply(
    content: str, calls: Sequence[ToolCall] = (), *, raw: str, thought: str = "", finish_reason: str = "stop"
) -> Reply:
    """As a sampled one would be: a call that cannot be run is in `tool_calls`, but not in the message."""
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    usable = [call for call in calls if not call.error]
    if usable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in usable
        ]
    nothing = np.empty(0)
    return Reply(message, Turn(nothing, nothing, nothing, nothing, 1.0, finish_reason), list(calls), raw)
