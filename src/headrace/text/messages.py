"""Messages, replies and tool calls: in the internal form, and in OpenAI's chat completions form.

Internally a message has text as content and objects as tool call arguments. Requests vary: content may be null or a
list of parts, arguments are JSON texts. What a chat format would silently drop is refused. Images and audio are not
supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.errors import BadInput
from headrace.rollout.types import ROLES, Message, Turn

INVALID_JSON = "the tool call is not valid JSON"
NO_NAME = "the tool call names no tool"
NOT_AN_OBJECT = "the arguments of a tool call must be a JSON object"
NOT_ENCODABLE = "the tool call has a number or a character that cannot be passed on"
"""Values of `ToolCall.error`, which the model reads as the result of its call."""
OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role names to those of chat formats."""


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


def build_tool_call(call_id: str, name: Any, arguments: Any, error: str = "") -> ToolCall:
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


class InvalidMessage(BadInput, ValueError):
    """A message or tool call that cannot be rendered or sent; `key` is its path, such as `messages[0].role`."""


def renderer_messages(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return a request's messages with roles and contents as a renderer expects them; other fields are kept."""
    rendered = []
    for key, message in _keyed_messages(messages):
        role = _read_role(key, message)
        _check_calls(key, message)
        rendered.append({**message, "role": role, "content": _read_content(key, message, parts=("text",))})
    return rendered


def canonical_messages(messages: Sequence[Any]) -> list[Message]:
    """Normalize a request's messages so that equal messages compare equal.

    Content becomes text, arguments become objects, ids default to "", and fields that no chat format reads are dropped.
    """
    return [_canonical_message(key, message) for key, message in _keyed_messages(messages)]


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `InvalidMessage` for a message that a renderer would drop or fail on."""
    for index, message in enumerate(messages):
        key = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidMessage(f"is a {type(message).__name__}, not a dict with a role and content", key=key)
        if message.get("role") not in ROLES[1:]:
            fix = f"Use {', '.join(ROLES[1:])}."
            raise InvalidMessage("not a role of chat formats", key=f"{key}.role", value=message.get("role"), fix=fix)
        content = message.get("content")
        if not isinstance(content, str | list | None):
            fact = f"is a {type(content).__name__}, not a text or a list of parts"
            raise InvalidMessage(fact, key=f"{key}.content")


def check_encodable(index: int, message: Message) -> None:
    """Raise `InvalidMessage` for integers beyond 64 bits and lone surrogates, which JSON may contain."""
    if not is_encodable(message):
        raise InvalidMessage("has a number or a character that cannot be encoded", key=f"messages[{index}]")


def openai_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages for an OpenAI server: arguments as JSON texts, tool results only after their call.

    Calls without an id get one, and so do their results. The result of a call that could not be parsed becomes a user
    message. `reasoning_content` is dropped: many servers refuse it.
    """
    written: list[Message] = []
    ids: set[str] = set()
    generated: list[str] = []
    for index, source in enumerate(messages):
        message = {name: value for name, value in source.items() if name != "reasoning_content"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = []
            for number, call in enumerate(calls):
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict):
                    raise InvalidMessage("has no function", key=f"messages[{index}].tool_calls[{number}]", value=call)
                call_id = call.get("id") or f"unnamed_{len(ids) + number}"
                if not call.get("id"):
                    generated.append(call_id)
                arguments = function.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                message["tool_calls"].append({**call, "id": call_id, "function": {**function, "arguments": text}})
            ids |= {call["id"] for call in message["tool_calls"]}
        elif message.get("role") == "tool" and not message.get("tool_call_id") and generated:
            message["tool_call_id"] = generated.pop(0)
        elif message.get("role") == "tool" and message.get("tool_call_id") not in ids:
            message = {"role": "user", "content": message.get("content", "")}
        written.append(message)
    return written


def parse_reply(message: Message, finish_reason: str) -> Reply:
    """Convert a server's message to a reply without tokens; calls that cannot be run are kept as text, too."""
    written = message.get("tool_calls") or ()
    calls = [_parse_call(number, call) for number, call in enumerate(written)]
    invalid = [json.dumps(raw) for raw, call in zip(written, calls, strict=True) if call.error]
    content = content_text(message.get("content"))
    reasoning = content_text(message.get("reasoning_content") or message.get("reasoning"))
    return untrained_reply(
        "\n".join([content, *invalid]).strip("\n") if invalid else content,
        calls,
        raw=f"<think>\n{reasoning}\n</think>\n\n{content}" if reasoning else content,
        reasoning=reasoning,
        finish_reason="length" if finish_reason == "length" else "stop",
    )


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, a list of parts, or null."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)


def refusal_text(message: Message) -> str:
    """Return the refusal in a server's message; empty if the model answered."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join(str(part["refusal"]) for part in (message, *parts) if part.get("refusal"))


def replace_surrogates(message: Message) -> Message:
    """Return the message with a question mark for each lone surrogate, so that it can be sent as UTF-8."""
    text = json.dumps(message, ensure_ascii=False)
    replaced: Message = json.loads(text.encode(errors="replace"))
    return replaced


def _keyed_messages(messages: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each message with its key for errors, `messages[N]`; raise if there is none."""
    if not messages:
        raise InvalidMessage("empty", key="messages")
    for index, message in enumerate(messages):
        yield f"messages[{index}]", message


def _read_role(key: str, message: Any) -> str:
    """Return the role of a message in chat formats; raise unless it is one of OpenAI's."""
    if not isinstance(message, dict):
        raise InvalidMessage("not an object with a role and content", key=key)
    role = message.get("role")
    if not isinstance(role, str) or role not in OPENAI_ROLES:
        fact = f"must be one of {', '.join(OPENAI_ROLES)}"
        raise InvalidMessage(fact, key=f"{key}.role", value=role)
    return OPENAI_ROLES[role]


def _check_calls(key: str, message: Message) -> None:
    """Raise unless the tool calls of a message are a list of named functions."""
    if message.get("function_call"):
        raise InvalidMessage("deprecated and not supported", key=f"{key}.function_call", fix="Send tool_calls.")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise InvalidMessage("must be a list of calls", key=f"{key}.tool_calls", value=calls)
    for number, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidMessage("must name a tool", key=f"{key}.tool_calls[{number}].function.name", value=name)


def _read_content(key: str, message: Message, parts: Sequence[str]) -> str:
    """Return the content as text; a list may have parts of the given types, and bare texts where refusals may be."""
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise InvalidMessage("must be text or a list of parts", key=f"{key}.content", value=content)
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if "refusal" in parts:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            is_valid = kind in parts
        else:
            is_valid = isinstance(part, dict) and part.get("type") in parts and isinstance(part.get("text"), str)
        if not is_valid:
            fact = 'must be {"type": "text", "text": ...}: only text is supported'
            raise InvalidMessage(fact, key=f"{key}.content[{index}]", value=part)
    return content_text(content)


def _canonical_message(key: str, source: Any) -> Message:
    role = _read_role(key, source)
    message: Message = {"role": role, "content": _read_content(key, source, parts=("text", "refusal"))}
    if role == "assistant":
        reasoning = source.get("reasoning_content") or source.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        _check_calls(key, source)
        if calls := source.get("tool_calls"):
            message["tool_calls"] = [
                _canonical_call(f"{key}.tool_calls[{number}]", call) for number, call in enumerate(calls)
            ]
    if role == "tool":
        message["tool_call_id"] = str(source.get("tool_call_id") or "")
    if isinstance(source.get("name"), str) and role in ("user", "tool"):
        message["name"] = source["name"]
    return message


def _canonical_call(key: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"not JSON: {error}", key=f"{key}.function.arguments", value=arguments) from error
    if not isinstance(parsed, dict):
        raise InvalidMessage("must be a JSON object", key=f"{key}.function.arguments", value=arguments)
    called = {"name": function["name"], "arguments": parsed}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


def _parse_call(number: int, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return build_tool_call(f"call_{number}", "", {})
    call_id, arguments = str(call.get("id") or f"call_{number}"), function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return build_tool_call(call_id, function.get("name"), {}, INVALID_JSON)
    return build_tool_call(call_id, function.get("name"), parsed)
