"""Errors of calls to an engine, one class for each reaction that a caller can have, and messages of servers."""

from __future__ import annotations

import json

from headrace.errors import Failure
from headrace.inference.schema import SCHEMA_HEADER

GATEWAY_STATUSES = (502, 504)
"""Sent by a gateway or load balancer while the engine behind it does not respond."""
MAX_QUOTE_CHARS = 500
"""Characters of a server's response in an error message."""
DEFAULT_BUSY_S, MAX_BUSY_S = 1.0, 30.0
"""Seconds without requests to a busy engine, if its response does not say how many, and at most."""


class EngineCallError(Failure):
    """A call to an engine that gave no result."""


class EngineUnavailable(EngineCallError):
    """No engine could be reached within the time for retries."""


class EngineRejected(EngineCallError):
    """The engine will never serve this request; the message is the engine's."""


class EngineTimeout(EngineCallError):
    """The engine took longer than the caller allows."""


class EngineFailed(EngineCallError):
    """The engine accepted the request and failed, or sent an invalid response."""


class EngineBusy(EngineCallError):
    """The engine's queue is full; no requests are sent for `pause` seconds."""

    def __init__(self, message: str, pause: float = DEFAULT_BUSY_S) -> None:
        super().__init__(message)
        self.pause = pause


def error_from_response(url: str, status: int, headers: dict[str, str], content: bytes) -> EngineCallError:
    """Return the error for a response other than 200.

    A 502 or 504 from a gateway is temporary. From our own server, which its schema header shows, it means an update
    whose weights did not arrive, so a retry would not help; neither would it for a 500.
    """
    message = server_message(content)[:MAX_QUOTE_CHARS]
    if status == 503 or (status in GATEWAY_STATUSES and SCHEMA_HEADER.lower() not in headers):
        return EngineUnavailable(f"the engine at {url} is not available: {message} (HTTP {status})")
    text = f"{message} (HTTP {status} from {url})"
    if status in (401, 403):
        text += "; client.api_key_var and admin_key_var name the variables with the keys for client.base_url"
    if status == 429:
        retry_after = headers.get("retry-after", "")
        return EngineBusy(text, min(float(retry_after), MAX_BUSY_S) if retry_after.isdecimal() else DEFAULT_BUSY_S)
    return (EngineRejected if 400 <= status < 500 else EngineFailed)(text)


def server_message(content: bytes) -> str:
    """Return the message of an error response, in OpenAI's format or a similar one, or the whole response."""
    text = content.decode(errors="replace").strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if name in value), None)
    return (value if isinstance(value, str) else text) or "no explanation"
