"""Server-sent events out of an HTTP/1.1 answer, as they arrive: its head, its body in pieces, the data of each event.

Left out: event names, ids and reconnection, which nobody who streams a model's answer sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

DONE = b"[DONE]"
"""The data of the last event, in OpenAI's form: it says nothing but that."""
PIECE = 65536


class Reader:
    """A connection, read with a deadline for each silence. Raises TimeoutError, and ConnectionError at its end."""

    def __init__(self, reader: asyncio.StreamReader, timeout: float) -> None:
        self._reader = reader
        self._timeout = timeout

    async def line(self) -> bytes:
        """Up to the next line break, without it. Raises ValueError for a line of unreasonable length."""
        async with asyncio.timeout(self._timeout):
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the server closed the connection")
        return line.rstrip(b"\r\n")

    async def some(self, most: int = PIECE) -> bytes:
        """What is there; empty at the end of the connection."""
        async with asyncio.timeout(self._timeout):
            return await self._reader.read(most)


async def read_head(reader: Reader) -> tuple[int, dict[str, str]]:
    """Status and headers, by name in lower case. Raises ValueError for what is no HTTP."""
    status = int((await reader.line()).decode("latin-1").split(" ", 2)[1])
    headers: dict[str, str] = {}
    while line := (await reader.line()).decode("latin-1"):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def read_body(reader: Reader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """In pieces. Raises ConnectionError if it breaks off before its end."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.line()).split(b";")[0], 16):
            async for piece in _exactly(reader, size):
                yield piece
            await reader.line()
    elif "content-length" in headers:
        async for piece in _exactly(reader, int(headers["content-length"])):
            yield piece
    else:
        while piece := await reader.some():
            yield piece


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, up to `[DONE]` or the end of the body."""
    events = Events()
    async for piece in pieces:
        for event in events.take(piece):
            yield event
        if events.done:
            return


class Events:
    """Finds the events in a body that comes in pieces. `done`: the last one was there, and the rest says nothing."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        """The line that has begun."""
        self._data: list[bytes] = []
        """Of the event that has begun."""

    def take(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ends in this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                self.done = event == DONE
                if self.done:
                    return
                yield event


async def _exactly(reader: Reader, size: int) -> AsyncIterator[bytes]:
    while size:
        if not (piece := await reader.some(min(size, PIECE))):
            raise ConnectionError("the server closed the connection")
        size -= len(piece)
        yield piece
