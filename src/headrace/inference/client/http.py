"""Small HTTP/1.1 exchanges over connections that are kept: one request at a time on each.

By hand because a request through aiohttp costs .3 ms of CPU on a small core, a fifth of all that a rollout costs the
orchestrator; this costs a third of that. A server is `http://HOST:PORT`, `https://HOST:PORT`, or
`unix:/PATH/OF/A/SOCKET`. A stream of events has a connection of its own, which ends with it. Left out: redirects,
compression, proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from headrace.inference.client.event_stream import Reader, read_body, read_events, read_head

P = TypeVar("P", bound=asyncio.Protocol)

UNIX = "unix:"


class Unreachable(OSError):
    """No answer came back: nobody listens, or the connection broke."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    """By name in lower case."""
    content: bytes


class Refused(Exception):
    """Events were asked for, and the server answered something else: `answer`."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}, and no events: {answer.content[:200].decode(errors='replace')}")
        self.answer = answer


class HttpClient:
    """Keeps as many connections to each server as were ever needed at once."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}

    async def request(
        self,
        method: str,
        base_url: str,
        route: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One exchange. Raises TimeoutError, or Unreachable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        message = _message(method, base_url, route, body, headers)
        while idle := self._idle.get(base_url):
            connection = idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, base_url, message, deadline)
                except _ClosedWhileIdle:
                    continue  # the server had given up on it before our request arrived
        connection = await _connect(base_url, timeout, _Connection)
        return await self._exchange(connection, base_url, message, deadline)

    async def stream(
        self,
        method: str,
        base_url: str,
        route: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events as they come, without the closing `[DONE]`; `timeout` is for each silence.

        Raises TimeoutError, Unreachable, also where the stream breaks off, and `Refused`. Whoever leaves before its
        end must close it (`contextlib.aclosing`): that closes the connection, as a cancellation does.
        """
        message = _message(method, base_url, route, body, headers)
        connection = await _connect(base_url, timeout, _Streaming)
        try:
            connection.transport.write(message)
            reader = Reader(connection.received, timeout)
            status, said = await read_head(reader)
            pieces = read_body(reader, said)
            if status != 200 or not said.get("content-type", "").startswith("text/event-stream"):
                raise Refused(Answer(status, said, b"".join([piece async for piece in pieces])))
            async for event in read_events(pieces):
                yield event
        except TimeoutError:  # an OSError like those that are not about time
            raise
        except OSError as error:
            raise Unreachable(str(error)) from error
        except (ValueError, IndexError) as error:
            raise Unreachable(f"the answer is not HTTP: {error}") from error
        finally:
            connection.transport.abort()

    async def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, base_url: str, message: bytes, deadline: float) -> Answer:
        expires = asyncio.get_running_loop().call_at(deadline, connection.expire)
        try:
            answer = await connection.send(message)
        except BaseException:
            connection.close()
            raise
        finally:
            expires.cancel()
        if connection.is_open:
            self._idle.setdefault(base_url, []).append(connection)
        return answer


async def _connect(base_url: str, timeout: float, protocol: Callable[[], P]) -> P:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            if base_url.startswith(UNIX):
                return (await loop.create_unix_connection(protocol, base_url.removeprefix(UNIX)))[1]
            parts = urlsplit(base_url)
            secure = parts.scheme == "https"
            host, port = parts.hostname or "localhost", parts.port or (443 if secure else 80)
            return (await loop.create_connection(protocol, host, port, ssl=secure or None))[1]
    except TimeoutError:
        raise
    except OSError as error:
        raise Unreachable(str(error)) from error


def _message(method: str, base_url: str, route: str, body: bytes | None, headers: Mapping[str, str] | None) -> bytes:
    host, path = ("localhost", "") if base_url.startswith(UNIX) else urlsplit(base_url)[1:3]
    content = body or b""
    more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]) if headers else ""
    head = (
        f"{method} {path}{route} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n"
        f"Content-Type: application/json\r\n{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _ClosedWhileIdle(Unreachable):
    """A kept connection broke before a single byte came back: the request had no effect, and may be sent again."""


class _Streaming(asyncio.StreamReaderProtocol):
    """A connection for one stream; one that nobody reads for a while is not filled any further."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = asyncio.StreamReader()
        super().__init__(self.received)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        super().connection_made(transport)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._head: tuple[int, dict[str, str], int] | None = None
        """Status, headers and where the body starts."""
        self._used = False

    def send(self, message: bytes) -> asyncio.Future[Answer]:
        self._answer = asyncio.get_running_loop().create_future()
        self._received.clear()
        self._head = None
        self._transport.write(message)
        return self._answer

    def expire(self) -> None:
        self._fail(TimeoutError("no answer in time"))
        self.close()

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked: it must not be taken for the answer to the next request
            self.close()
            return
        self._received += data
        try:
            self._read_head()
            content = None if self._head is None else self._body(ended=False)
        except ValueError as error:
            self._fail(Unreachable(f"the answer is not HTTP: {error}"))
            self.close()
            return
        if content is not None:
            self._finish(content)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._head is not None and (content := self._body(ended=True)) is not None:
            self._finish(content)
        nothing = not self._received
        kind = _ClosedWhileIdle if self._used and nothing else Unreachable
        self._fail(kind(str(error or "the server closed the connection")))

    def _read_head(self) -> None:
        if self._head is not None or (end := self._received.find(b"\r\n\r\n")) < 0:
            return
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._head = int(first.split(" ", 2)[1]), headers, end + 4

    def _body(self, *, ended: bool) -> bytes | None:
        """The whole of it, or None as long as some is missing. `ended`: the server has closed the connection."""
        assert self._head is not None
        status, headers, start = self._head
        if status in (204, 304):
            return b""
        if "content-length" in headers:
            end = start + int(headers["content-length"])
            return bytes(self._received[start:end]) if len(self._received) >= end else None
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return _join_chunks(self._received, start)
        return bytes(self._received[start:]) if ended else None

    def _finish(self, content: bytes) -> None:
        assert self._head is not None
        status, headers, _ = self._head
        if headers.get("connection", "").lower() == "close":
            self.close()
        self._used = True
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(Answer(status, headers, content))

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


def _join_chunks(received: bytearray, start: int) -> bytes | None:
    parts: list[bytes] = []
    while (end := received.find(b"\r\n", start)) >= 0:
        size = int(received[start:end].split(b";")[0], 16)
        start = end + 2
        if len(received) < start + size + 2:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(bytes(received[start : start + size]))
        start += size + 2
    return None
