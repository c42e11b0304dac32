"""HTTP in the engine's dialect: bodies through msgspec, every error in one form, every reply with its schema."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.inference.embedded.request import EngineError, EngineStopped, InvalidRequest
from headrace.inference.schema import SCHEMA_HEADER, ErrorDetail, ErrorResponse
from headrace.inference.weights.link import WeightsUnreachable
from headrace.inference.weights.published import WeightsError
from headrace.rollout.batch import SCHEMA

T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]

HEADERS = {SCHEMA_HEADER: str(SCHEMA)}
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this one; it is for logs."""


class NotServed(ValueError):
    """What was asked for does not exist here."""


class ClientGone(Exception):
    """The client hung up before its answer was ready."""


def reply(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, HEADERS, "application/json")


def error_body(message: str, kind: str) -> ErrorResponse:
    return ErrorResponse(ErrorDetail(message, kind))


async def read_body(http: HttpRequest, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's body as its type; what is wrong with it is named by its path."""
    try:
        return decoder.decode(await http.body())
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error).replace("$.", "")) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


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
        case NotServed():
            return reply(error_body(str(error), "not_found_error"), 404)
        case WeightsUnreachable():
            return reply(error_body(str(error), "bad_gateway"), 502)
        case InvalidRequest() | WeightsError():
            return reply(error_body(str(error), "invalid_request_error"), 400)
        case ClientGone():
            return reply(error_body("the client closed the connection", "client_closed"), CLIENT_CLOSED_REQUEST)
        case EngineStopped():
            return reply(error_body(str(error), "unavailable"), 503)
        case EngineError():
            return reply(error_body(str(error), "engine_error"), 500)
        case _:
            raise error


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown routes and methods."""
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}"
    return reply(
        error_body(text, "not_found_error" if error.status_code == 404 else "invalid_request_error"), error.status_code
    )


async def on_bug(_: HttpRequest, error: Exception) -> Response:
    return reply(error_body(f"internal error: {type(error).__name__}: {error}", "internal_error"), 500)
