"""HTTP in the server's dialect: bodies within bounds, every error in OpenAI's form, every reply with its schema."""

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
"""Nobody reads this one; it is for logs."""
RETRY_AFTER = {"Retry-After": "1"}
FEW_FIELDS = 8
"""A body of so many at most is told which they are when it has another."""
LARGE = 1 << 20
LARGE_SECONDS = 60.0
"""How long a body of more bytes than that may hold up other large ones."""
LINGER_SECONDS = 5.0
LINGER_BYTES = 1 << 28
"""How long, and how much of, a body that is too large is thrown away: cut off sooner, its sender would not read why."""


class ClientGone(Exception):
    """The client hung up before its answer was ready."""


class TooLarge(ValueError):
    """The body is larger than this server takes."""


class TooSlow(ValueError):
    """A large body did not come in time."""


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, {**HEADERS, **(headers or {})}, "application/json")


def error_body(message: str, kind: str) -> ErrorResponse:
    return ErrorResponse(ErrorDetail(message, kind))


@contextlib.asynccontextmanager
async def body_of(
    http: HttpRequest,
    decoder: msgspec.json.Decoder[T],
    most: int,
    large: asyncio.Semaphore,
    check: Callable[[bytearray], Awaitable[None]] | None = None,
    if_empty: bytes = b"",
) -> AsyncIterator[T]:
    """The request's body, of at most that many bytes, as its type; what is wrong with it is named by its path.

    Large bodies take turns until the caller has made what it needs of them: many at once would be much memory. `check`
    raises for what shall not even be decoded.
    """
    async with contextlib.AsyncExitStack() as turn:
        content = await _read_at_most(http, most, lambda: turn.enter_async_context(large))
        if check is not None:
            await check(content)
        yield _decoded(content or if_empty, decoder)


def _decoded(content: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_problem(str(error), decoder.type)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _problem(error: str, kind: Any) -> str:
    """What msgspec says of a body of that type, in our words."""
    words = error.replace("Object contains unknown field", "this server knows no field").replace("$.", "")
    known = getattr(kind, "__struct_fields__", ())
    if words == error or " - at " in words or len(known) > FEW_FIELDS:
        return words
    return f"{words} here: there is {', '.join(known) or 'none'}"


async def _read_at_most(http: HttpRequest, most: int, wait_turn: Callable[[], Awaitable[None]]) -> bytearray:
    too_large = TooLarge(f"the body is larger than {most / 2**20:g} MB, the most that this server takes (max_body_mb)")
    announced = http.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(None) as limit:
            async for chunk in http.stream():
                if len(content) + len(chunk) > most:
                    raise too_large
                if len(content) <= LARGE < len(content) + len(chunk):
                    await wait_turn()
                    limit.reschedule(asyncio.get_running_loop().time() + LARGE_SECONDS)
                content += chunk
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise TooSlow(f"the rest of the body did not come within {LARGE_SECONDS:g} s") from None
    return content


def answering(handler: Handler) -> Handler:
    """Turn the errors that a handler may raise into replies."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Exception as error:
            return error_reply(error)

    return answer


def error_reply(error: Exception) -> Response:
    """The reply to an error of a known kind; any other is a bug, and is raised on."""
    match error:
        case ModelNotFound():
            return reply(error_body(str(error), "not_found_error"), 404)
        case WeightsUnreachable():
            return reply(error_body(str(error), "bad_gateway"), 502)
        case InvalidRequest() | WeightsError():
            return reply(error_body(str(error), "invalid_request_error"), 400)
        case Unauthorized():
            wanted = {"WWW-Authenticate": 'Bearer realm="headrace"'}
            return reply(error_body(str(error), "authentication_error"), 401, wanted)
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
    """A reply to a body that still comes: said at once, then the rest is thrown away, then the connection ends."""

    def __init__(self, body: Any, status: int) -> None:
        super().__init__(msgspec.json.encode(body), status, {**HEADERS, "Connection": "close"}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left, deadline = LINGER_BYTES, time.monotonic() + LINGER_SECONDS
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
    """Unknown routes and methods."""
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return reply(error_body(text, kind), error.status_code, dict(error.headers or {}))


async def on_bug(_: HttpRequest, error: Exception) -> Response:
    return reply(error_body(f"internal error: {type(error).__name__}: {error}", "internal_error"), 500)
