"""Replies, errors in OpenAI's format, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.inference.backend import (
    AdminTimeout,
    EngineError,
    EngineOverloaded,
    EngineStopped,
    Generation,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
)
from headrace.inference.keys import Forbidden, Unauthorized
from headrace.inference.schema import SCHEMA_HEADER, ErrorDetail, ErrorResponse
from headrace.inference.server.request_bodies import ClientGone, TooLarge, TooSlow
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.schema import SCHEMA

T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]

HEADERS = {SCHEMA_HEADER: str(SCHEMA)}
CLIENT_CLOSED_REQUEST = 499
"""For metrics; the client is gone."""
LINGER_S = 5.0
LINGER_BYTES = 1 << 28
"""How much of an oversized body is discarded: a sender that is cut off earlier would not read the reply."""
DONE = b"data: [DONE]\n\n"


def reply(
    body: Any, status: int = 200, headers: dict[str, str] | None = None, kind: type[Response] = Response
) -> Response:
    return kind(msgspec.json.encode(body), status, {**HEADERS, **(headers or {})}, "application/json")


def answering(handler: Handler, check_key: Callable[[str | None], None] | None = None) -> Handler:
    """Return a handler that checks the `Authorization` header first, and whose errors become replies."""

    async def answer(http: HttpRequest) -> Response:
        try:
            if check_key is not None:
                check_key(http.headers.get("authorization"))
            return await handler(http)
        except Exception as error:
            return error_reply(error)

    return answer


class _Lingering(Response):
    """A reply to a body that is still arriving: sent at once, then the rest is discarded and the connection closed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left, deadline = LINGER_BYTES, time.monotonic() + LINGER_S
        while left > 0 and (remaining := deadline - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(receive(), remaining)
            except TimeoutError:
                break
            if message["type"] != "http.request" or not message.get("more_body"):
                break
            left -= len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_CLOSE = {"Connection": "close"}
_RETRY = {"Retry-After": "1"}
_ERRORS: list[tuple[type[Exception], int, str, dict[str, str]]] = [
    (ModelNotFound, 404, "not_found_error", {}),
    (WeightsUnreachable, 502, "bad_gateway", {}),
    (WeightsError, 400, "invalid_request_error", {}),
    (InvalidRequest, 400, "invalid_request_error", {}),
    (Unauthorized, 401, "authentication_error", {"WWW-Authenticate": 'Bearer realm="headrace"'}),
    (Forbidden, 403, "permission_error", {}),
    (TooLarge, 413, "invalid_request_error", _CLOSE),
    (TooSlow, 408, "invalid_request_error", _CLOSE),
    (ClientGone, CLIENT_CLOSED_REQUEST, "client_closed", {}),
    (RequestCancelled, CLIENT_CLOSED_REQUEST, "client_closed", {}),
    (EngineOverloaded, 429, "overloaded", _RETRY),
    (EngineStopped, 503, "unavailable", _RETRY),
    (AdminTimeout, 504, "timeout", {}),
    (EngineError, 500, "engine_error", {}),
]
"""Error, HTTP status, OpenAI's type and headers of its reply. The first entry that matches applies."""


def error_reply(error: Exception) -> Response:
    """Return the reply to an expected error; any other is raised again."""
    for kind, status, name, headers in _ERRORS:
        if isinstance(error, kind):
            text = "the client closed the connection" if status == CLIENT_CLOSED_REQUEST else str(error)
            response = _Lingering if kind is TooLarge else Response
            return reply(ErrorResponse(ErrorDetail(text, name)), status, headers, response)
    raise error


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Return the reply to an unknown route or method."""
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return reply(ErrorResponse(ErrorDetail(text, kind)), error.status_code, dict(error.headers or {}))


async def on_bug(_: HttpRequest, error: Exception) -> Response:
    """Return the reply to an error that no handler expects."""
    text = f"internal error: {type(error).__name__}: {error}"
    return reply(ErrorResponse(ErrorDetail(text, "internal_error")), 500)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; a disconnect cancels it and raises `ClientGone`. The body must have been read."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        hangup.cancel()
        working.cancel()
        await asyncio.wait({working})


def event(body: Any) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events. Its requests are cancelled when it ends, fails or the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation]) -> None:
        headers = {**HEADERS, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, OSError):
            pass  # the client is gone
        finally:
            for generation in self._generations:
                generation.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
                async for content in events:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
        except (EngineError, InvalidRequest) as error:  # vLLM rejects some requests late
            content = b"data: " + bytes(error_reply(error).body) + b"\n\n"
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
