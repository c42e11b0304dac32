"""HTTP bodies within limits, errors in OpenAI's format, and replies with the schema header."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.inference.backend import (
    EngineError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
)
from headrace.inference.schema import SCHEMA_HEADER, ErrorDetail, ErrorResponse
from headrace.inference.server.keys import Forbidden, Unauthorized
from headrace.inference.weights.errors import WeightsError, WeightsUnreachable
from headrace.rollout.batch import SCHEMA

T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]

HEADERS = {SCHEMA_HEADER: str(SCHEMA)}
CLIENT_CLOSED_REQUEST = 499
"""For metrics; the client is gone."""
RETRY_AFTER = {"Retry-After": "1"}
MAX_LISTED_FIELDS = 8
"""An unknown field of a body with at most so many fields is reported with their names."""
LARGE_BODY_BYTES = 1 << 20
LARGE_BODY_TIMEOUT_S = 60.0
"""For the rest of a large body, during which other large bodies may have to wait."""
LINGER_S = 5.0
LINGER_BYTES = 1 << 28
"""How much of an oversized body is discarded: a sender that is cut off earlier would not read the reply."""


class ClientGone(Exception):
    """The client disconnected before its reply was ready."""


class TooLarge(ValueError):
    """The body exceeds `max_body_mb`."""


class TooSlow(ValueError):
    """A large body did not arrive in time."""


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, {**HEADERS, **(headers or {})}, "application/json")


def error_body(message: str, kind: str) -> ErrorResponse:
    return ErrorResponse(ErrorDetail(message, kind))


@contextlib.asynccontextmanager
async def body_of(
    http: HttpRequest,
    decoder: msgspec.json.Decoder[T],
    max_bytes: int,
    large: asyncio.Semaphore,
    check: Callable[[bytearray], Awaitable[None]] | None = None,
    if_empty: bytes = b"",
) -> AsyncIterator[T]:
    """Read and decode a request's body of at most `max_bytes`; errors name the path of the invalid field.

    Large bodies hold the semaphore until the caller has processed them, to limit memory. `check` raises for content
    that must not be decoded.
    """
    async with contextlib.AsyncExitStack() as permit:
        content = await _read_body(http, max_bytes, lambda: permit.enter_async_context(large))
        if check is not None:
            await check(content)
        yield _decode(content or if_empty, decoder)


def exceeds_json_limits(content: bytes | bytearray, max_list: int, max_others: int) -> bool:
    """Whether JSON has more than `max_others` strings, keys, lists and objects, or certainly a list over `max_list`.

    Decoding millions of values blocks all threads for seconds; counting takes a hundredth of that and releases the
    GIL. Values after a list, up to the next one, count as part of it, with a tolerance of `max_others`.
    """
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left delimits a string
    strings = bare.count(b'"') // 2
    if strings > max_others:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    if strings + outside.count(b"[") + outside.count(b"{") > max_others:
        return True
    return any(part.count(b",") > max_list + max_others for part in outside.split(b"["))


def _decode(content: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "unknown field").replace("$.", "")
        fields = getattr(decoder.type, "__struct_fields__", ())
        if "unknown field" in text and " - at " not in text and len(fields) <= MAX_LISTED_FIELDS:
            text = f"{text}; the fields are: {', '.join(fields) or 'none'}"
        raise InvalidRequest(text) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


async def _read_body(http: HttpRequest, max_bytes: int, acquire: Callable[[], Awaitable[None]]) -> bytearray:
    too_large = TooLarge(f"the body is larger than {max_bytes / 2**20:g} MB (max_body_mb)")
    stated = http.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(None) as limit:
            async for chunk in http.stream():
                if len(content) + len(chunk) > max_bytes:
                    raise too_large
                if len(content) <= LARGE_BODY_BYTES < len(content) + len(chunk):
                    await acquire()
                    limit.reschedule(asyncio.get_running_loop().time() + LARGE_BODY_TIMEOUT_S)
                content += chunk
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise TooSlow(f"the rest of the body did not arrive within {LARGE_BODY_TIMEOUT_S:g} s") from None
    return content


def answering(handler: Handler) -> Handler:
    """Return a handler whose errors become replies."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Exception as error:
            return error_reply(error)

    return answer


def error_reply(error: Exception) -> Response:
    """Return the reply to an expected error; any other is raised again."""
    match error:
        case ModelNotFound():
            return reply(error_body(str(error), "not_found_error"), 404)
        case WeightsUnreachable():
            return reply(error_body(str(error), "bad_gateway"), 502)
        case InvalidRequest() | WeightsError():
            return reply(error_body(str(error), "invalid_request_error"), 400)
        case Unauthorized():
            challenge = {"WWW-Authenticate": 'Bearer realm="headrace"'}
            return reply(error_body(str(error), "authentication_error"), 401, challenge)
        case Forbidden():
            return reply(error_body(str(error), "permission_error"), 403)
        case TooLarge():
            return _Lingering(error_body(str(error), "invalid_request_error"), 413)
        case TooSlow():
            return reply(error_body(str(error), "invalid_request_error"), 408, {"Connection": "close"})
        case ClientGone() | RequestCancelled():
            return reply(error_body("the client closed the connection", "client_closed"), CLIENT_CLOSED_REQUEST)
        case EngineOverloaded():
            return reply(error_body(str(error), "overloaded"), 429, RETRY_AFTER)
        case EngineStopped():
            return reply(error_body(str(error), "unavailable"), 503, RETRY_AFTER)
        case EngineError():
            return reply(error_body(str(error), "engine_error"), 500)
        case _:
            raise error


class _Lingering(Response):
    """A reply to a body that is still arriving: sent at once, then the rest is discarded and the connection closed."""

    def __init__(self, body: Any, status: int) -> None:
        super().__init__(msgspec.json.encode(body), status, {**HEADERS, "Connection": "close"}, "application/json")

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


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Return the reply to an unknown route or method."""
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return reply(error_body(text, kind), error.status_code, dict(error.headers or {}))


async def on_bug(_: HttpRequest, error: Exception) -> Response:
    return reply(error_body(f"internal error: {type(error).__name__}: {error}", "internal_error"), 500)
