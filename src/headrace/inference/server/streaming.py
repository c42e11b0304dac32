"""Answers that come in parts: what several requests produce, as it comes, and server-sent events out of it."""

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
News = AsyncIterator[tuple[int, TokenChunk | GenerationResult]]
"""Which of the requests it comes from, and a piece of it or, once, its result."""

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def news_of(generations: Sequence[Generation]) -> News:
    """What the requests produce, in the order it comes. Ends after the last result; raises `EngineError`."""
    arrived: asyncio.Queue[tuple[int, TokenChunk | GenerationResult | Exception]] = asyncio.Queue()

    async def follow(index: int, generation: Generation) -> None:
        try:
            async for piece in generation.chunks():
                arrived.put_nowait((index, piece))
            arrived.put_nowait((index, await generation.result()))
        except Exception as error:
            arrived.put_nowait((index, error))

    following = [asyncio.ensure_future(follow(index, each)) for index, each in enumerate(generations)]
    try:
        left = len(generations)
        while left:
            index, found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            left -= isinstance(found, GenerationResult)
            yield index, found
    finally:
        for task in following:
            task.cancel()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; a client that hangs up cancels it, and `ClientGone` is raised. The body must have been read."""
    working = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(_hangup(receive))
    try:
        await asyncio.wait({working, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        hangup.cancel()
        working.cancel()
        await asyncio.wait({working})


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events until they end, fail or the client hangs up; the requests behind them end with them."""

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
            pass  # nobody is there to be told
        finally:
            for generation in self._generations:
                generation.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
                async for content in events:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
        except (EngineError, InvalidRequest) as error:  # vLLM judges some requests late
            content = b"data: " + bytes(error_reply(error).body) + b"\n\n"
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
