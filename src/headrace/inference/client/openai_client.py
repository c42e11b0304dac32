"""A client for servers with OpenAI's API: judges, teachers, models under evaluation.

One call is one request; the caller decides what to retry (`OpenAIError.transient`, `retry`). Left out: streaming, which
`chat_stream` does. The engines of a run are called with token ids, through `engine_client`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.config.headers import find_invalid_header
from headrace.errors import BadInput, Failure
from headrace.inference.client.errors import MAX_QUOTE_CHARS, server_message

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

MIN_RETRY_S, MAX_RETRY_S = 0.1, 5.0
"""Delay before a retry, the first and the longest."""
MAX_RETRY_AFTER_S = 30.0
"""Longest delay that a server may request instead."""
NOT_FINITE = re.compile(rb"[:,\[]\s*-?(NaN|Infinity)\b")
"""Numbers that some servers write although JSON does not allow them."""


class OpenAIError(Failure):
    """A call without a result. `status` is the HTTP status, if any; `retry_after` the requested delay in seconds."""

    transient = True
    """Whether the same call may succeed later."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class OpenAIRejected(OpenAIError):
    """The server refuses this request; the message quotes it."""

    transient = False


class OpenAIUnreachable(OpenAIError):
    """No response: the connection was refused or lost."""


class OpenAITimeout(OpenAIError):
    """No response in time."""


class OpenAIBusy(OpenAIError):
    """The server has too many requests at the moment."""


class OpenAIFailed(OpenAIError):
    """The server failed, or sent an invalid response."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatResponse(msgspec.Struct, frozen=True):
    """The assistant's message as received, tool calls included."""

    message: dict[str, Any]
    finish_reason: str
    usage: Usage

    @property
    def text(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


class ModelEntry(msgspec.Struct, frozen=True):
    """An entry of `/models`."""

    id: str
    owned_by: str | None = None
    root: str | None = None
    """The model's directory or its name on the hub, by servers that report it."""
    max_model_len: int | None = None
    """None if the server does not report it."""


class ModelList(msgspec.Struct):
    """The response of `/models`."""

    data: list[ModelEntry]


class OpenAIClient:
    """A client of one model at `base_url`, for example https://api.openai.com/v1. For one event loop at a time.

    The key is read from the environment variable `api_key_var` at each call. Error messages contain neither the key,
    even if the server repeats it, nor a user and password of `base_url`. `timeout` is in seconds and does not include
    the wait for one of the `max_concurrent` permits.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_var: str | None = None,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        max_concurrent: int = 64,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            fix = "Write http://HOST:PORT/v1 or https://..."
            raise BadInput("not an HTTP address", key="base_url", value=hide_password(base_url), fix=fix)
        if max_concurrent < 1:
            raise BadInput("must be at least 1", key="max_concurrent", value=max_concurrent)
        if (complaint := find_invalid_header(headers or {})) is not None:
            raise BadInput(f"requests to {hide_password(base_url)} cannot be made: {complaint}")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._api_key_var = api_key_var
        self._timeout = timeout
        self._headers = dict(headers or {})
        self._max_concurrent = max_concurrent
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient
        self._permits: asyncio.Semaphore

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> ChatResponse:
        """Return the reply to a conversation. Fields that are None are not sent; `extra` is added to the request."""
        options = {"tools": tools or None, "temperature": temperature, "max_tokens": max_tokens}
        options = {name: value for name, value in options.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), **options, **(extra or {})}
        completion = await self.request("/chat/completions", _Completion, body)
        if not completion.choices:
            raise OpenAIFailed(f"the response of {self.address} has no choices")
        choice = completion.choices[0]
        return ChatResponse(choice.message, choice.finish_reason or "", completion.usage or Usage())

    async def models(self) -> list[ModelEntry]:
        """Return the served models. Raises `OpenAIError`."""
        return (await self.request("/models", ModelList)).data

    async def request(
        self, route: str, kind: type[T], body: Mapping[str, Any] | None = None, *, at_root: bool = False
    ) -> T:
        """Make one request, POST if it has a body, and decode the response as `kind`. `at_root`: not below /v1."""
        base = self.base_url.removesuffix("/v1") if at_root else self.base_url
        content = await self._send("GET" if body is None else "POST", base + route, body)
        return decode_response(content, kind, self.address, self._key())

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._loop = None

    @property
    def address(self) -> str:
        """The base URL without a password."""
        return hide_password(self.base_url)

    async def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> bytes:
        """Make one request, with the key, and return the body of the response. Raises `OpenAIError`."""
        import httpx

        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop
            self._permits = asyncio.Semaphore(self._max_concurrent)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._max_concurrent)
            self._http = httpx.AsyncClient(limits=limits, timeout=None)
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        shown, key = hide_password(url), self._key()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        async with self._permits:
            try:
                async with asyncio.timeout(self._timeout):
                    response = await self._http.request(method, url, content=content, headers=headers | self._headers)
            except TimeoutError as error:
                raise OpenAITimeout(f"{shown} did not answer within {self._timeout:g} s") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                reason = _without_key(key, str(error) or type(error).__name__)
                raise OpenAIUnreachable(f"{shown} cannot be reached: {reason}") from error
            except httpx.InvalidURL as error:
                raise BadInput(f"not an address: {error}", key="base_url", value=shown) from error
        hint = ""
        if response.status_code in (401, 403) and self._api_key_var and not key:
            hint = f"; the environment variable {self._api_key_var}, for the key, is not set"
        return checked_content(response, response.content, key, hint)

    def _key(self) -> str:
        """Return the API key from the environment; empty if there is none."""
        key = os.environ.get(self._api_key_var, "").strip() if self._api_key_var else ""
        if not (key.isascii() and key.isprintable()):
            fact = "the environment variable contains a line break or a character that is not ASCII"
            raise BadInput(fact, key=self._api_key_var, fix="Set it to the key alone.")
        return key


def checked_content(response: httpx.Response, content: bytes, key: str | None, hint: str = "") -> bytes:
    """Return the content of a response; raises an `OpenAIError` that quotes the server if the status is not 200.

    The message does not contain the key, and ends with the hint.
    """
    status = response.status_code
    if status == 200:
        return content
    quote = _without_key(key, server_message(content))[:MAX_QUOTE_CHARS]
    text = f"{quote} (HTTP {status} from {hide_password(str(response.url))}){hint}"
    if status in (408, 429):
        raise OpenAIBusy(text, status, _parse_retry_after(response.headers.get("retry-after")))
    if status >= 500 and status != 501:  # 501 is permanent
        raise OpenAIFailed(text, status, _parse_retry_after(response.headers.get("retry-after")))
    raise OpenAIRejected(text, status)


def decode_response(content: bytes, kind: type[T], address: str, key: str | None) -> T:
    """Decode a response as `kind`. Raises `OpenAIFailed`, whose message quotes it without the key."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        quote = _without_key(key, content.decode(errors="replace"))[:MAX_QUOTE_CHARS]
        reason = "a number is not finite" if NOT_FINITE.search(content) else error
        raise OpenAIFailed(f"invalid response of {address} ({reason}): {quote}") from error


def _without_key(key: str | None, text: str) -> str:
    return text.replace(key, "***") if key else text


async def retry(
    attempt: Callable[[], Awaitable[T]],
    delays: Iterator[float],
    retryable: Callable[[OpenAIError], bool] = lambda error: error.transient,
) -> T:
    """Repeat the attempt after each delay, or after the longer one that the server requests, while it may succeed."""
    while True:
        try:
            return await attempt()
        except OpenAIError as error:
            delay = next(delays, None) if retryable(error) else None
            if delay is None:
                raise
            requested = error.retry_after or 0.0
        await asyncio.sleep(max(delay, min(requested, MAX_RETRY_AFTER_S)))


def backoff_delays(seconds: float) -> Iterator[float]:
    """Yield exponentially growing delays until `seconds` after the first."""
    deadline = time.monotonic() + seconds
    delay = MIN_RETRY_S
    while time.monotonic() + delay <= deadline:
        yield delay
        delay = min(2 * delay, MAX_RETRY_S)


def hide_password(url: str) -> str:
    """Remove user and password from a URL."""
    return re.sub(r"(^|//)[^/]*@", r"\1", url, count=1)


def _parse_retry_after(header: str | None) -> float | None:
    """Parse a Retry-After header; None for a date, which is also allowed there."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
