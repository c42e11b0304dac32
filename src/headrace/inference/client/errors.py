"""How a call to an engine fails: one kind of error for each thing that a caller can do about it."""

from __future__ import annotations

import msgspec

from headrace.errors import Failure
from headrace.inference.schema import SCHEMA_HEADER, ErrorResponse

GATEWAY = (502, 504)
"""What a gateway or load balancer says while the engine behind it is away, or does not answer it."""
USUAL_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds for which an engine wants to be left alone, unless it says for how long, and at most."""


class EngineCallError(Failure):
    """A call to an engine that gave no result. Subclasses say what to do about it."""


class EngineUnavailable(EngineCallError):
    """No engine could be reached within the time allowed for trying."""


class EngineRejected(EngineCallError):
    """The engine will never serve this request; the message is its own."""


class EngineTimeout(EngineCallError):
    """The engine took longer than the caller allows."""


class EngineFailed(EngineCallError):
    """The engine accepted the request and failed at it, or answered what it must not."""


class EngineBusy(EngineCallError):
    """The engine has no room for the request at the moment, and asks for a pause."""

    def __init__(self, message: str, pause: float = USUAL_PAUSE) -> None:
        super().__init__(message)
        self.pause = pause


def failure_of(url: str, status: int, headers: dict[str, str], content: bytes) -> EngineCallError:
    """The error that a reply other than 200 stands for.

    A 502 or 504 is a gateway's, and passes as soon as the engine behind it is back. One of our own servers, which its
    header tells, means an update whose weights did not come: the same would not come again. A 500 is no gateway's word
    but the engine's: weights that are not finite, say, which every try would find again.
    """
    try:
        message = msgspec.json.decode(content, type=ErrorResponse).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):  # not one of ours: a proxy, or another server altogether
        message = content[:200].decode(errors="replace")
    if status == 503 or (status in GATEWAY and SCHEMA_HEADER.lower() not in headers):
        return EngineUnavailable(f"the engine at {url} is not available: {message} (HTTP {status})")
    words = f"{message} (HTTP {status} from {url})"
    if status in (401, 403):
        words += (
            "; keys for engines in client.base_url are in the variables that client.api_key_var and admin_key_var name"
        )
    if status == 429:
        wish = headers.get("retry-after", "")
        return EngineBusy(words, min(float(wish), LONGEST_PAUSE) if wish.isdecimal() else USUAL_PAUSE)
    return (EngineRejected if 400 <= status < 500 else EngineFailed)(words)
