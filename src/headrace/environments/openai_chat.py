"""Conversations with a server that speaks OpenAI's chat completions: what it is sent, and what its answer means.

Left out: tokens. Such a server does not tell them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.environments.base import EpisodeError, PromptTooLong, Reply, ToolCall
from headrace.environments.replies import NO_JSON, tool_call, untrained_reply
from headrace.inference.client.openai_client import ChatAnswer, OpenAIError
from headrace.rollout.types import Message

FULL = ("context", "max_model_len")
"""How servers say that a conversation is too long."""


async def chat(
    ask: Callable[[list[Message]], Awaitable[ChatAnswer]],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    reason: str,
) -> Reply:
    """What `ask` gets from a server for the conversation; a failure costs the episode, for this `reason`."""
    try:
        sent = as_openai(messages)
        json.dumps([sent, tools], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EpisodeError("invalid_message", f"a message or tool cannot be sent as JSON: {error}") from error
    try:
        answer = await ask(sent)
    except OpenAIError as error:
        if is_full(error):
            raise PromptTooLong(str(error)) from error
        raise EpisodeError(reason, str(error)) from error
    return as_reply(answer.message, answer.finish_reason)


def is_full(error: OpenAIError) -> bool:
    """Whether the conversation, or what may be answered to it, is more than the server takes."""
    return error.status == 400 and any(word in str(error) for word in FULL)


def as_openai(messages: Sequence[Message]) -> list[Message]:
    """Messages as OpenAI's servers want them: arguments as JSON texts, and tool results only for calls that were made.

    A call without an id gets one, and so does the result that follows. What a model was told about a call that could
    not be read is told by the user. Thoughts stay here: many servers refuse them.
    """
    told: list[Message] = []
    known: set[str] = set()
    unnamed: list[str] = []
    for given in messages:
        message = {name: value for name, value in given.items() if name != "reasoning_content"}
        if message.get("tool_calls"):
            calls = [_call_as_openai(len(known) + n, call) for n, call in enumerate(message["tool_calls"])]
            known |= {call["id"] for call in calls}
            unnamed += [call["id"] for call, own in zip(calls, message["tool_calls"], strict=True) if not own.get("id")]
            told.append({**message, "tool_calls": calls})
        elif message.get("role") == "tool" and not message.get("tool_call_id") and unnamed:
            told.append({**message, "tool_call_id": unnamed.pop(0)})
        elif message.get("role") == "tool" and message.get("tool_call_id") not in known:
            told.append({"role": "user", "content": message.get("content", "")})
        else:
            told.append(message)
    return told


def _call_as_openai(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise EpisodeError("invalid_message", f"the tool call {call!r:.200} has no function: write its name in there")
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "id": call.get("id") or f"unnamed_{number}", "function": {**function, "arguments": written}}


def as_reply(message: Message, finish_reason: str) -> Reply:
    """A server's message as a reply: each tool call that it made, those that cannot be run with the reason."""
    given = message.get("tool_calls") or ()
    calls = [_tool_call(number, call) for number, call in enumerate(given)]
    unread = [json.dumps(call) for call, read in zip(given, calls, strict=True) if read.error]
    content = text_of(message)
    thought = _text(message.get("reasoning_content") or message.get("reasoning"))
    return untrained_reply(
        "\n".join([content, *unread]).strip("\n") if unread else content,
        calls,
        raw=f"<think>\n{thought}\n</think>\n\n{content}" if thought else content,
        thought=thought,
        finish_reason="length" if finish_reason == "length" else "stop",
    )


def text_of(message: Message) -> str:
    """What a server's message says; some write it in parts."""
    return _text(message.get("content"))


def refusal_of(message: Message) -> str:
    """Why the model would not answer, in its own words; empty if it did."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join(str(given["refusal"]) for given in (message, *parts) if given.get("refusal"))


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)


def _tool_call(number: int, call: Any) -> ToolCall:
    """OpenAI's form has the arguments as a JSON text, as the model wrote it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return tool_call(f"call_{number}", "", {})
    identity, given = str(call.get("id") or f"call_{number}"), function.get("arguments") or "{}"
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return tool_call(identity, function.get("name"), {}, NO_JSON)
    return tool_call(identity, function.get("name"), arguments)
