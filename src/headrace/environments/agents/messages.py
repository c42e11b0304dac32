"""Messages as agents send them, in OpenAI's form, made into the one form in which conversations are told apart here.

Agents write the same message in many ways: no content or an empty one, a text or a list of parts, arguments as JSON
texts in any spelling, fields that nobody reads. Left out on purpose: pictures and sounds, which are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.environments.openai_chat import text_of
from headrace.inference.backend import InvalidRequest
from headrace.inference.server.messages import ROLES
from headrace.rollout.types import Message

PARTS = ("text", "refusal")
"""Parts of a content that are text."""

_encode = msgspec.json.Encoder(order="deterministic").encode


def encode(value: Any) -> bytes:
    """As JSON that is the same for the same content. What a model wrote may have half a character, or a huge number."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, sort_keys=True).encode()


def readable(message: Message) -> Message:
    """The message as it can be sent: with a question mark for each half of a character."""
    try:
        _encode(message)
    except OverflowError:
        return message
    except UnicodeEncodeError:
        written: Message = json.loads(json.dumps(message, ensure_ascii=False).encode(errors="replace"))
        return written
    return message


def plain(messages: Sequence[Any]) -> list[Message]:
    """The messages in one form: text as content, arguments as objects, and no field that chat formats do not know.

    Raises `InvalidRequest` that names the message at fault.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def face(message: Message) -> bytes:
    """What an assistant's message says to whoever reads it: words and calls, without thoughts, ids and space around."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [str(message.get("content") or "").strip(), [[call["name"], call["arguments"]] for call in calls]]
    return encode(said)


def check_portable(index: int, message: Message) -> None:
    """JSON may hold numbers and halves of characters that neither a prompt nor another process takes."""
    try:
        msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        words = f"messages[{index}] has a number or a character that cannot be passed on: {error}"
        raise InvalidRequest(words) from error


def call_ids(message: Message) -> list[str]:
    return [str(call.get("id") or "") for call in message.get("tool_calls", ())]


def _plain(where: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} is not an object with a role and content")
    role = ROLES.get(given.get("role", ""))
    if role is None:
        raise InvalidRequest(f"{where}.role is {given.get('role')!r:.60}: it must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(where, given)}
    if role == "assistant":
        thought = given.get("reasoning_content") or given.get("reasoning")
        if isinstance(thought, str):
            message["reasoning_content"] = thought
        if given.get("function_call"):
            raise InvalidRequest(f"{where}.function_call is of an older interface: send tool_calls")
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    if isinstance(given.get("name"), str) and role in ("user", "tool"):
        message["name"] = given["name"]
    return message


def _content(where: str, message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise InvalidRequest(f"{where}.content must be a text or a list of parts")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in PARTS:
            raise InvalidRequest(f"{where}.content has a part of type {kind!r:.60}: the policy reads text alone")
    return text_of(message)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} has no function with a name")
    arguments = function.get("arguments") or {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": read},
    }
