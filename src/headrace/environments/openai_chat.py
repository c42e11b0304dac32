"""Chat turns of an episode on a server with OpenAI's chat completions API, which returns text without tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.environments.base import EpisodeError, PromptTooLong, Reply
from headrace.inference.client.openai_client import ChatResponse, OpenAIError
from headrace.rollout.types import Message
from headrace.text.messages import openai_messages, parse_reply

OVERFLOW_WORDS = ("context", "max_model_len")
"""Words with which servers report that a conversation is too long."""


async def chat(
    request: Callable[[list[Message]], Awaitable[ChatResponse]],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    reason: str,
) -> Reply:
    """Return the reply that `request` gets from a server; a failed request raises `EpisodeError(reason, ...)`."""
    try:
        written = openai_messages(messages)
        json.dumps([written, tools], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EpisodeError("invalid_message", f"a message or tool cannot be sent as JSON: {error}") from error
    try:
        answer = await request(written)
    except OpenAIError as error:
        if is_context_overflow(error):
            raise PromptTooLong(str(error)) from error
        raise EpisodeError(reason, str(error)) from error
    return parse_reply(answer.message, answer.finish_reason)


def is_context_overflow(error: OpenAIError) -> bool:
    """Return whether the server refused the conversation, or the requested number of new tokens, as too long."""
    return error.status == 400 and any(word in str(error) for word in OVERFLOW_WORDS)
