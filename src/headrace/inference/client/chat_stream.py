"""A synchronous client that streams chat replies from a server with OpenAI's API, for `headrace chat`.

Ctrl-C interrupts a call; leaving the loop closes the connection, and the server cancels the request. For concurrent
calls use `openai_client`, whose errors these are.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.inference.client.errors import MAX_QUOTE_CHARS, server_message
from headrace.inference.client.http import EventParser
from headrace.inference.client.openai_client import (
    ModelEntry,
    ModelList,
    OpenAIError,
    OpenAIFailed,
    OpenAIUnreachable,
    Usage,
    checked_content,
    decode_response,
    hide_password,
)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
"""For connecting and for short requests; a reply has no time limit."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ReplyChunk(NamedTuple):
    kind: Literal["text", "thought", "call"]
    text: str


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer servers' name for `reasoning_content`."""
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass
class StreamedReply:
    """The part of a reply that has been received."""

    text: str = ""
    thought: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add_event(self, event: bytes) -> list[ReplyChunk]:
        """Add a server-sent event and return its new text. Raises `OpenAIFailed`."""
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            quote = event.decode(errors="replace")[:MAX_QUOTE_CHARS]
            raise OpenAIFailed(f"the reply contains an invalid event ({error}): {quote}") from error
        if chunk.error is not None:
            raise OpenAIFailed(f"the reply broke off: {server_message(event)[:MAX_QUOTE_CHARS]}")
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return []
        choice, delta = chunk.choices[0], chunk.choices[0].delta
        self.finish_reason = choice.finish_reason or self.finish_reason
        thought, text = delta.reasoning_content or delta.reasoning or "", delta.content or ""
        self.thought += thought
        self.text += text
        calls = [ReplyChunk("call", self._add_call(call)) for call in delta.tool_calls or ()]
        return [new for new in (ReplyChunk("thought", thought), ReplyChunk("text", text), *calls) if new.text]

    def message(self) -> dict[str, Any]:
        """Return the assistant's message for the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    def _add_call(self, call: _Call) -> str:
        """Add a part of a tool call (the name first, then parts of its arguments) and return its text."""
        name, arguments, shown = call.function.name or "", call.function.arguments or "", ""
        if call.index not in self.calls:
            break_before = "\n" if self.calls or (self.text and not self.text.endswith("\n")) else ""
            function = {"name": name, "arguments": ""}
            self.calls[call.index] = {"id": call.id or "", "type": "function", "function": function}
            shown = f"{break_before}{name} "
        self.calls[call.index]["function"]["arguments"] += arguments
        return shown + arguments


class ChatClient:
    """A client of the server at `base_url`, for example http://127.0.0.1:8000/v1."""

    def __init__(self, base_url: str, key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._root = self.base_url.removesuffix("/v1")
        self.key = key
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        authority = os.environ.get("SSL_CERT_FILE")  # which httpx reads only together with the variables of proxies
        self._http = httpx.Client(
            headers=headers,
            verify=ssl.create_default_context(cafile=authority) if authority else True,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # no proxy for this machine
        )

    @property
    def address(self) -> str:
        """The base URL without a password."""
        return hide_password(self.base_url)

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[ModelEntry]:
        """Return the served models. Raises `OpenAIError`."""
        return self._request("GET", f"{self.base_url}/models", ModelList, timeout=CONNECT_TIMEOUT_S).data

    def count_tokens(self, model: str, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the conversation's length, or None if the server has no `/tokenize` as ours and vLLM do."""
        body = {"model": model, "messages": list(messages)}
        with contextlib.suppress(OpenAIError):
            return self._request("POST", f"{self._root}/tokenize", dict[str, Any], body).get("count")
        return None

    def weights_version(self) -> str | None:
        """Return the version of the weights, or None if the server does not report it as ours does."""
        with contextlib.suppress(OpenAIError):
            health = self._request("GET", f"{self._root}/health", dict[str, Any], timeout=CONNECT_TIMEOUT_S)
            return health.get("version")
        return None

    def stream(self, body: Mapping[str, Any], reply: StreamedReply) -> Iterator[ReplyChunk]:
        """Yield the reply to a request as it arrives and add it to `reply`. Raises `OpenAIError`."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        url = f"{self.base_url}/chat/completions"
        with self._naming_unreachable(), self._http.stream("POST", url, content=json.dumps(request)) as response:
            if response.status_code != 200:
                checked_content(response, response.read(), self.key)
            events = EventParser()
            for part in response.iter_bytes():
                for event in events.feed(part):
                    yield from reply.add_event(event)
                if events.done:
                    break
        if reply.finish_reason is None:
            raise OpenAIFailed(f"{self.address} ended the stream in the middle of the reply")

    def _request(
        self, method: str, url: str, kind: type[T], body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> T:
        content = None if body is None else json.dumps(body)
        with self._naming_unreachable():
            response = self._http.request(method, url, content=content, timeout=timeout)
        return decode_response(checked_content(response, response.content, self.key), kind, self.address, self.key)

    @contextlib.contextmanager
    def _naming_unreachable(self) -> Iterator[None]:
        """Raise errors of the connection in the block as `OpenAIUnreachable`."""
        try:
            yield
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise OpenAIUnreachable(f"{self.address} cannot be reached: {reason}") from error
