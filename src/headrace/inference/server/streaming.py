"""Streamed responses: updates of several requests as they arrive, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.inference.backend import EngineError, Generation, GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.server.replies import HEADERS, ClientGone, error_reply

T = TypeVar("T")
Updates = AsyncIterator[tuple[int, TokenChunk | GenerationResult]]
"""The index of a request with a chunk of it, or at its end its result."""

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def updates_of(generations: Sequence[Generation]) -> Updates:
    """Yield chunks and results of all requests as they arrive. Raises `EngineError`."""
    arrived: asyncio.Queue[tuple[int, TokenChunk | GenerationResult | Exception]] = asyncio.Queue()

    async def follow(index: int, generation: Generation) -> None:
        try:
            async for chunk in generation.chunks():
                arrived.put_nowait((index, chunk))
            arrived.put_nowait((index, await generation.result()))
        except Exception as error:
            arrived.put_nowait((index, error))

    following = [asyncio.ensure_future(follow(index, each)) for index, each in enumerate(generations)]
    try:
        left = len(generations)
        while left:
            index, update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            left -= isinstance(update, GenerationResult)
            yield index, update
    finally:
        for task in following:
            task.cancel()


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
