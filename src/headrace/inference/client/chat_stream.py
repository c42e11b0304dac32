"""Replies read as they are sampled, from any server that speaks OpenAI's interface, one at a time.

For a person who waits, in plain calls that Ctrl-C interrupts: leaving the loop hangs up, and the server gives the
request up. Whoever makes many calls at once goes through `openai_client`, whose errors these are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.inference.client.event_stream import Events
from headrace.inference.client.openai_client import (
    LONGEST_QUOTE,
    ModelEntry,
    OpenAIBusy,
    OpenAIError,
    OpenAIFailed,
    OpenAIRejected,
    OpenAIUnreachable,
    Usage,
    own_words,
    without_password,
)

T = TypeVar("T")

CONNECTING = 10.0
"""Seconds until somebody must answer the call; a reply may take as long as it likes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ReplyChunk(NamedTuple):
    """Some more of a reply."""

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
    """What newer servers call the same."""
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class _Models(msgspec.Struct):
    data: list[ModelEntry]


class _Count(msgspec.Struct):
    count: int


class _Health(msgspec.Struct):
    version: str | None = None


class Reply:
    """What has come of a reply."""

    def __init__(self) -> None:
        self.text = ""
        self.thought = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: str | None = None
        self.usage: Usage | None = None

    def take(self, event: bytes) -> list[ReplyChunk]:
        """Add an event's data; returns what it brought. Raises `OpenAIFailed`."""
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            quote = event.decode(errors="replace")[:LONGEST_QUOTE]
            raise OpenAIFailed(f"the reply has what it should not ({error}): {quote}") from error
        if chunk.error is not None:
            raise OpenAIFailed(f"the reply broke off: {own_words(event)[:LONGEST_QUOTE]}")
        self.usage = chunk.usage or self.usage
        pieces = [piece for choice in chunk.choices[:1] for piece in self._add(choice)]
        return [piece for piece in pieces if piece.text]

    def message(self) -> dict[str, Any]:
        """The assistant's message, as a conversation holds it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    def _add(self, choice: _Choice) -> Iterator[ReplyChunk]:
        delta = choice.delta
        self.finish_reason = choice.finish_reason or self.finish_reason
        thought = delta.reasoning_content or delta.reasoning or ""
        self.thought += thought
        yield ReplyChunk("thought", thought)
        self.text += delta.content or ""
        yield ReplyChunk("text", delta.content or "")
        for call in delta.tool_calls or ():
            yield ReplyChunk("call", self._add_call(call))

    def _add_call(self, call: _Call) -> str:
        """Calls may come in parts: first the name, then the arguments bit by bit."""
        name, arguments = call.function.name or "", call.function.arguments or ""
        if call.index not in self.calls:
            break_before = "\n" if self.calls or (self.text and not self.text.endswith("\n")) else ""
            self.calls[call.index] = {"id": call.id or "", "type": "function", "function": {"name": name}}
            shown = f"{break_before}{name} {arguments}"
        else:
            shown = arguments
        function = self.calls[call.index]["function"]
        function["arguments"] = function.get("arguments", "") + arguments
        return shown


class ChatServer:
    """`base_url` is what comes before `/chat/completions`: http://127.0.0.1:8000/v1."""

    def __init__(self, base_url: str, key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._key = key
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECTING),
            trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # a proxy does not lead to this machine
        )

    @property
    def address(self) -> str:
        """For people."""
        return without_password(self.base_url)

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[ModelEntry]:
        """What it serves. Raises `OpenAIError`."""
        content = self._exchange("GET", f"{self.base_url}/models", timeout=CONNECTING)
        return self._read(content, _Models).data

    def count_tokens(self, model: str, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """How long the conversation is, where the server can tell: ours and vLLM can."""
        try:
            content = self._exchange("POST", f"{self._root}/tokenize", {"model": model, "messages": list(messages)})
            return self._read(content, _Count).count
        except OpenAIError:
            return None

    def weights_version(self) -> str | None:
        """Which weights it samples from, where it says so: ours does."""
        try:
            content = self._exchange("GET", f"{self._root}/health", timeout=CONNECTING)
            return self._read(content, _Health).version if content else None
        except OpenAIError:
            return None

    def stream(self, body: Mapping[str, Any], reply: Reply) -> Iterator[ReplyChunk]:
        """The reply to a request, piece by piece, also added to `reply`. Raises `OpenAIError`."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        url = f"{self.base_url}/chat/completions"
        try:
            with self._http.stream("POST", url, content=json.dumps(asked)) as answer:
                if answer.status_code != 200:
                    raise self._failure(url, answer.status_code, answer.read())
                events = Events()
                for piece in answer.iter_bytes():
                    for event in events.take(piece):
                        yield from reply.take(event)
                    if events.done:
                        break
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if reply.finish_reason is None:
            raise OpenAIFailed(f"{self.address} broke off in the middle of the reply")

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def _exchange(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> bytes:
        content = None if body is None else json.dumps(body)
        try:
            answer = self._http.request(method, url, content=content, timeout=timeout)
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise self._failure(url, answer.status_code, answer.content)
        return answer.content

    def _unreachable(self, error: Exception) -> OpenAIUnreachable:
        return OpenAIUnreachable(f"{self.address} cannot be reached: {str(error) or type(error).__name__}")

    def _failure(self, url: str, status: int, content: bytes) -> OpenAIError:
        words = own_words(content)[:LONGEST_QUOTE]
        if self._key:
            words = words.replace(self._key, "***")
        words += f" (HTTP {status} from {without_password(url)})"
        if status in (408, 429):
            return OpenAIBusy(words, status)
        return OpenAIFailed(words, status) if status >= 500 else OpenAIRejected(words, status)

    def _read(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            quote = content.decode(errors="replace")[:LONGEST_QUOTE]
            raise OpenAIFailed(f"{self.address} answered what it should not ({error}): {quote}") from error
