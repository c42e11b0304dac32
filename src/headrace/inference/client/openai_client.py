"""A line to any server that speaks OpenAI's interface: a judge, a teacher, a model to be probed.

One call is one request: whoever makes it decides what is worth another try (`transient` tells, `again` tries). Left
out: streaming. The engines of a run are reached through `engine_client`, which speaks in tokens.
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

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

LONGEST_QUOTE = 500
"""Characters of a server's own words in a message."""
FIRST_PAUSE = 0.1
GROWN_PAUSE = 5.0
"""Seconds before a request is made again, the first time and after many."""
LONGEST_WISH = 30.0
"""Seconds that a server may ask for instead."""
NOT_FINITE = re.compile(rb"[:,\[]\s*-?(NaN|Infinity)\b")
"""What some servers write although it is no JSON."""


class OpenAIError(Failure):
    """A call that gave no result. `status` is the server's, if it answered, `retry_after` the seconds it asked for."""

    transient = False
    """Whether the same call may succeed later."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class OpenAIUnreachable(OpenAIError):
    """No answer came back: nobody listens, or the connection broke."""

    transient = True


class OpenAITimeout(OpenAIError):
    """No answer came back in time."""

    transient = True


class OpenAIRejected(OpenAIError):
    """The server will not serve this request; the message has its own words."""


class OpenAIBusy(OpenAIError):
    """Too many requests for the server, at the moment."""

    transient = True


class OpenAIFailed(OpenAIError):
    """The server failed at the request, or answered what it must not."""

    transient = True


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatAnswer(msgspec.Struct, frozen=True):
    """What the model answered: the assistant's message as it came, tool calls included."""

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
    """What a server says of a model that it has."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    """The longest sequence that it takes, where it says so."""


class _Models(msgspec.Struct):
    data: list[ModelEntry]


class OpenAIClient:
    """`base_url` is what comes before `/chat/completions`: https://api.openai.com/v1. For one event loop at a time.

    The key is read from the environment variable `api_key_var` at each call; a server that wants none gets none. No
    message shows it, even where the server repeats it, nor a user and password in `base_url`. `timeout` is in seconds,
    for a request that is under way: waiting for one of the `max_concurrent` does not count.
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
            raise BadInput(
                f"the address {without_password(base_url)!r} is none: write http://HOST:PORT/v1 or https://..."
            )
        if max_concurrent < 1:
            raise BadInput(f"max_concurrent must be at least 1, not {max_concurrent}")
        if (complaint := find_invalid_header(headers or {})) is not None:
            raise BadInput(f"requests to {without_password(base_url)} cannot be made: {complaint}")
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
    ) -> ChatAnswer:
        """One reply to the conversation. What is None is left to the server; `extra` goes into the request as it is."""
        asked = {"tools": tools or None, "temperature": temperature, "max_tokens": max_tokens}
        given = {name: value for name, value in asked.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), **given, **(extra or {})}
        completion = await self.ask("/chat/completions", _Completion, body)
        if not completion.choices:
            raise OpenAIFailed(f"{self.address} answered without a choice")
        choice = completion.choices[0]
        return ChatAnswer(choice.message, choice.finish_reason or "", completion.usage or Usage())

    async def models(self) -> list[str]:
        """The names of the models that the server has."""
        return [model.id for model in await self.model_entries()]

    async def model_entries(self) -> list[ModelEntry]:
        return (await self.ask("/models", _Models)).data

    async def ask(
        self, route: str, kind: type[T], body: Mapping[str, Any] | None = None, *, at_root: bool = False
    ) -> T:
        """One exchange, GET or with a body POST, and its answer as a `kind`. `at_root`: not below /v1."""
        base = self.base_url.removesuffix("/v1") if at_root else self.base_url
        return self._read(await self._exchange("GET" if body is None else "POST", base + route, body), kind)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._loop = None

    @property
    def address(self) -> str:
        """For people."""
        return without_password(self.base_url)

    async def _exchange(self, method: str, url: str, body: Mapping[str, Any] | None) -> bytes:
        import httpx

        self._enter_loop()
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        shown = without_password(url)
        async with self._permits:
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._http.request(method, url, content=content, headers=self._all_headers())
            except TimeoutError as error:
                raise OpenAITimeout(f"{shown} did not answer within {self._timeout:g} s") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                words = self._without_key(str(error) or type(error).__name__)
                raise OpenAIUnreachable(f"{shown} cannot be reached: {words}") from error
            except httpx.InvalidURL as error:
                raise BadInput(f"the address {shown!r} is none: {error}") from error
        if answer.status_code != 200:
            raise self._failure(shown, answer)
        return answer.content

    def _enter_loop(self) -> None:
        """Connections belong to an event loop."""
        import httpx

        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._permits = asyncio.Semaphore(self._max_concurrent)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._max_concurrent)
            self._http = httpx.AsyncClient(limits=limits, timeout=None)

    def _all_headers(self) -> dict[str, str]:
        key = self._key()
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        return {"Content-Type": "application/json", **authorization, **self._headers}

    def _key(self) -> str:
        key = os.environ.get(self._api_key_var, "").strip() if self._api_key_var else ""
        if not (key.isascii() and key.isprintable()):
            raise BadInput(
                f"the environment variable {self._api_key_var} holds what is in no key, "
                "a line break or a character beyond ASCII: set it to the key alone"
            )
        return key

    def _without_key(self, words: str) -> str:
        key = self._key()
        return words.replace(key, "***") if key else words

    def _read(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            quote = self._without_key(content.decode(errors="replace"))[:LONGEST_QUOTE]
            why = "a number in it is not finite" if NOT_FINITE.search(content) else error
            raise OpenAIFailed(f"{self.address} answered what it should not ({why}): {quote}") from error

    def _failure(self, shown: str, answer: httpx.Response) -> OpenAIError:
        status = answer.status_code
        words = self._without_key(own_words(answer.content))[:LONGEST_QUOTE] + f" (HTTP {status} from {shown})"
        if status in (401, 403) and self._api_key_var and not self._key():
            words += f"; the environment variable {self._api_key_var}, for the key, is not set"
        if status in (408, 429):
            return OpenAIBusy(words, status, _seconds(answer.headers.get("retry-after")))
        if status >= 500 and status != 501:  # what it does not implement now it will not later
            return OpenAIFailed(words, status, _seconds(answer.headers.get("retry-after")))
        return OpenAIRejected(words, status)


async def again(
    attempt: Callable[[], Awaitable[T]], pauses: Iterator[float], worth: Callable[[OpenAIError], bool] | None = None
) -> T:
    """What the attempt gives, made anew after each pause as long as it fails for a reason that is `worth` it.

    Unset, whatever may pass is. A server that wants a longer pause gets it.
    """
    while True:
        try:
            return await attempt()
        except OpenAIError as error:
            pause = next(pauses, None) if (error.transient if worth is None else worth(error)) else None
            if pause is None:
                raise
            wanted = error.retry_after or 0.0
        await asyncio.sleep(max(pause, min(wanted, LONGEST_WISH)))


def growing_pauses(seconds: float) -> Iterator[float]:
    """Pauses, ever longer ones, for so long after the first is asked for."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while time.monotonic() + pause <= deadline:
        yield pause
        pause = min(2 * pause, GROWN_PAUSE)


def own_words(content: bytes) -> str:
    """What the server said: OpenAI's form of an error, one of those that others use, or whatever it is."""
    text = content.decode(errors="replace").strip()
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    while isinstance(said, dict):
        said = next((said[name] for name in ("error", "message", "detail") if name in said), None)
    words = said if isinstance(said, str) else text
    return words or "no explanation"


def without_password(url: str) -> str:
    """An address without the user and password that it may have."""
    return re.sub(r"(^|//)[^/]*@", r"\1", url, count=1)


def _seconds(header: str | None) -> float | None:
    """A date, which the header may have instead, is left to the caller's own patience."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
