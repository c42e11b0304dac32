"""`/v1/responses`: OpenAI's responses API, whole and streamed, as another form of a chat.

A request becomes a `ChatRequest`, and the chat's message or its deltas become items. Nothing is stored: what would need
it (`store`, `previous_response_id`, `conversation`, `background`, references to items) is rejected. Left out, too:
tools other than functions, pictures and files.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.inference.backend import GenerationResult, InvalidRequest
from headrace.inference.server.chat import Chat, ChatRequest, StreamedChoice
from headrace.inference.server.request_bodies import (
    JsonSchema,
    ResponseFormat,
    SamplingRequest,
    Unsupported,
    refuse_unsupported,
    usage_of,
)
from headrace.inference.server.streaming import Updates

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests logprobs; other values name what replies of this server never have."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Unsupported = "medium"


class ResponsesRequest(SamplingRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    cache_salt: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    # Accepted and ignored, since they do not change the reply.
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    stream_options: Any = None
    truncation: Any = None
    """A prompt that is too long is refused, whatever this is."""

    parallel_tool_calls: Unsupported = True
    background: Unsupported = False
    conversation: Unsupported = None
    max_tool_calls: Unsupported = None
    prompt: Unsupported = None
    reasoning: Unsupported = msgspec.field(default_factory=dict)

    def chat_request(self) -> ChatRequest:
        """Return the same request as a chat. Raises `InvalidRequest`."""
        fact, previous = "this server does not store responses", self.previous_response_id
        if self.store:
            raise InvalidRequest(fact, key="store", value=True, fix="Set it to false, or leave it out.")
        if previous is not None:
            fix = "Send the whole conversation as input."
            raise InvalidRequest(fact, key="previous_response_id", value=previous, fix=fix)
        self.reasoning = {key: value for key, value in (self.reasoning or {}).items() if value is not None}
        for body in (self, self.text):
            if body is not None:
                refuse_unsupported(body)
        sampling = {name: getattr(self, name) for name in SamplingRequest.__struct_fields__}
        sampling["max_tokens"] = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        wanted = None if self.text is None else self.text.format
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return ChatRequest(
            **sampling,
            messages=system + list(_messages(self.input)),
            model=self.model,
            stream=self.stream,
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            tool_choice=self.tool_choice,
            logprobs=LOGPROBS in (self.include or []) or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            response_format=None if wanted is None else ResponseFormat(wanted.type, JsonSchema(wanted.schema)),
        )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the format of a chat. Raises `InvalidRequest` for other tools."""
    if tool.get("type") != "function":
        raise InvalidRequest("only functions are supported", key=f"tools[{index}].type", value=tool.get("type"))
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key not in ("type", "strict")},
    }


def _messages(items: str | Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat; an assistant's reasoning, text and calls, which are items here, are one message."""
    reply: dict[str, Any] = {}
    for index, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items):
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and role == "assistant"):
            if "content" in reply and kind != "function_call":  # the next reply
                yield reply
                reply = {}
            reply["role"] = "assistant"
        elif reply:
            yield {"content": "", **reply}
            reply = {}
        match kind:
            case "message" if role == "assistant":
                reply["content"] = _text(item.get("content"), index)
            case "message":
                yield {"role": role, "content": _text(item.get("content"), index)}
            case "reasoning":
                reply["reasoning_content"] = _text(item.get("content") or item.get("summary") or [], index)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                reply.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output"), index)
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            case _:
                raise InvalidRequest("not supported", key=f"input[{index}].type", value=kind)
    if reply:
        yield {"content": "", **reply}


def _text(content: Any, index: int) -> str:
    """Return a text or the joined texts of its parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise InvalidRequest("must be a text, or parts of texts", key=f"input[{index}].content", value=kind)
        texts.append(part["text"])
    return "".join(texts)


def reply(
    chat: Chat, body: ResponsesRequest, chat_body: ChatRequest, prompt: list[int], result: GenerationResult
) -> dict[str, Any]:
    """Return the response of a request that is not streamed."""
    message, reason = chat.message(chat_body, prompt, result)
    output, logprobs = _Output(), chat.token_details(chat_body, result)["logprobs"]
    for _ in (*output.add(message, logprobs), *output.end()):
        pass  # only a stream needs the events
    return _response(chat, body, prompt, output, result, reason)


async def stream(
    chat: Chat, body: ResponsesRequest, chat_body: ChatRequest, prompt: list[int], updates: Updates
) -> AsyncIterator[bytes]:
    """Yield the events of a response."""
    choice, output, number = StreamedChoice(chat, chat_body, prompt, 0), _Output(), 0
    response = _response(chat, body, prompt, output)

    def event(fields: Mapping[str, Any]) -> bytes:
        nonlocal number
        content = msgspec.json.encode({**fields, "sequence_number": number})
        number += 1
        return b"event: %s\ndata: %s\n\n" % (fields["type"].encode(), content)

    for kind in ("response.created", "response.in_progress"):
        yield event({"type": kind, "response": response})
    async with contextlib.aclosing(updates):  # type: ignore[type-var]
        async for _, update in updates:
            for fields in choice.advance(update):
                [delta] = fields["choices"]
                for each in output.add(delta["delta"], delta["logprobs"]):
                    yield event(each)
            if isinstance(update, GenerationResult):
                for each in output.end():
                    yield event(each)
                end = _response(chat, body, prompt, output, update, delta["finish_reason"])
                end |= {key: response[key] for key in ("id", "created_at")}
                yield event({"type": f"response.{end['status']}", "response": end})


def _response(
    chat: Chat,
    body: ResponsesRequest,
    prompt: list[int],
    output: _Output,
    result: GenerationResult | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    """Return a response; without a result one that is in progress."""
    is_cut = reason == "length"
    usage = None
    if result is not None:
        counts = usage_of(len(prompt), [result], 1)
        usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.total_tokens,
        }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if result is None else "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": body.model or chat.model_name,
        "output": output.items if result is not None else [],
        "metadata": body.metadata or {},
        "parallel_tool_calls": True,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        **{name: getattr(body, name) for name in ("instructions", "temperature", "top_p", "max_output_tokens")},
        "previous_response_id": None,
        "store": False,
        "text": body.text or {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": usage,
        **({} if result is None or result.logprobs_mode is None else {"logprobs_mode": result.logprobs_mode}),
    }


class _Output:
    """The items of a response so far. Each change yields the events of a stream."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Add the delta of a chat's message, or the whole message."""
        if text := delta.get("reasoning_content"):
            yield from self._add_text("reasoning", text, [])
        scores = (logprobs or {}).get("content", [])
        if (text := delta.get("content")) or scores:
            yield from self._add_text("message", text or "", scores)
        for call in delta.get("tool_calls", []):
            yield from self._add_call(call)

    def end(self) -> Iterator[dict[str, Any]]:
        """Complete the last item. A response has at least one."""
        if not self.items:
            yield from self._open("message")
        yield from self._close()

    @property
    def _place(self) -> dict[str, Any]:
        """The fields of an event that name the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _add_text(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        [part] = self.items[-1]["content"]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more = {"logprobs": logprobs}
        yield {"type": f"response.{part['type']}.delta", **self._place, "content_index": 0, "delta": text, **more}

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        """Add an item of type `message` or `reasoning` with an empty text."""
        item: dict[str, Any] = {"id": f"{kind[:3]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            item["role"], part = "assistant", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        self.items.append({**item, "content": [part]})
        self._is_open = True
        place, index = self._place, {"output_index": len(self.items) - 1}
        yield {"type": "response.output_item.added", **index, "item": {**item, "content": []}}
        empty = {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
        yield {"type": "response.content_part.added", **place, "content_index": 0, "part": empty}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Complete the open item, if there is one."""
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = "completed"
        [part] = item["content"]
        place = {**self._place, "content_index": 0}
        whole = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield {"type": f"response.{part['type']}.done", **place, **whole}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "name": name}
        item |= {"arguments": arguments, "status": "completed"}
        self.items.append(item)
        place, index = self._place, {"output_index": len(self.items) - 1}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", **index, "item": begun}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        yield {"type": "response.output_item.done", **index, "item": item}
