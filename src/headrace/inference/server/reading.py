"""Request bodies: read within limits of size, time and memory, then decoded.

A large body holds one of a few places until it has been processed. A sender that stalls keeps its place only while
no other body needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from headrace.inference.backend import InvalidRequest

T = TypeVar("T")

MAX_LISTED_FIELDS = 8
"""An unknown field of a body with at most so many fields is reported with their names."""
LARGE_BODY_BYTES = 1 << 20
MAX_LARGE_BODIES = 8
"""Large bodies that are read at the same time; more wait in the network."""
BODY_TIMEOUT_S = 60.0
"""For a whole body; for a large one from the moment that it has a place."""
MIN_BYTES_PER_S = 1 << 20
"""A large body that arrives more slowly gives up its place if another one needs it."""
SLOW_GRACE_S = 1.0
"""How long it may fall behind that rate."""
SLOW_POLL_S = 0.25


class ClientGone(Exception):
    """The client disconnected before its reply was ready."""


class TooLarge(ValueError):
    """The body exceeds `max_body_mb`."""


class TooSlow(ValueError):
    """The body did not arrive in time."""


class LargeBodies:
    """The places of large bodies. While another body waits, one that arrives too slowly loses its place."""

    def __init__(self, places: int = MAX_LARGE_BODIES) -> None:
        self._places = asyncio.Semaphore(places)
        self._slow_at: dict[asyncio.Timeout, float] = {}
        """When a body that is still arriving counts as slow, by its timeout, in the event loop's time."""

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it in the block."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOW_POLL_S):
                    await self._places.acquire()
                    break
            now = asyncio.get_running_loop().time()
            for timeout in [timeout for timeout, slow_at in self._slow_at.items() if slow_at < now]:
                self.end(timeout)
                timeout.reschedule(now)
        try:
            yield
        finally:
            self._places.release()

    def progress(self, timeout: asyncio.Timeout, size: int) -> None:
        """Record that `size` more bytes of a body have arrived, whose reading `timeout` limits."""
        now = asyncio.get_running_loop().time()
        slow_at = max(self._slow_at.get(timeout, now + SLOW_GRACE_S), now) + size / MIN_BYTES_PER_S
        self._slow_at[timeout] = min(slow_at, now + SLOW_GRACE_S)

    def end(self, timeout: asyncio.Timeout) -> None:
        """Forget a body that has arrived or failed."""
        self._slow_at.pop(timeout, None)


@contextlib.asynccontextmanager
async def read_body(
    http: HttpRequest, max_bytes: int, large: LargeBodies, timeout_s: float = BODY_TIMEOUT_S
) -> AsyncIterator[bytearray]:
    """Read a request's body of at most `max_bytes` within `timeout_s`.

    Large bodies hold their place until the caller has processed them, to limit memory.
    """
    too_large = TooLarge(f"the body is larger than {max_bytes / 2**20:g} MB (max_body_mb)")
    stated = http.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise too_large
    content = bytearray()
    async with contextlib.AsyncExitStack() as place:
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                async for chunk in http.stream():
                    if len(content) + len(chunk) > max_bytes:
                        raise too_large
                    if len(content) <= LARGE_BODY_BYTES < len(content) + len(chunk):
                        timeout.reschedule(None)
                        await place.enter_async_context(large.place())
                        timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)
                    content += chunk
                    if len(content) > LARGE_BODY_BYTES:
                        large.progress(timeout, len(chunk))
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise TooSlow(
                f"only {len(content)} bytes of the body arrived within {timeout_s:g} s (http.body_timeout), or others "
                "waited for its place. Retry."
            ) from None
        finally:
            large.end(timeout)
        yield content


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


def decode_body(content: bytes | bytearray, kind: type[T]) -> T:
    """Decode JSON as a struct. Raises `InvalidRequest`, which names the path of the invalid field."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "unknown field").replace("$.", "")
        fields = getattr(kind, "__struct_fields__", ())
        if "unknown field" in text and " - at " not in text and len(fields) <= MAX_LISTED_FIELDS:
            text = f"{text}; the fields are: {', '.join(fields) or 'none'}"
        raise InvalidRequest(text) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
