"""Exchanges over kept connections: bodies in all their forms, and servers that misbehave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from headrace.inference.client.http import HttpClient, Unreachable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[tuple[str, list[int]]]:
    """Calls `handle` with each request's head and body; gives its URL, and the number of requests per connection."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                connections[number] += 1
                await handle(reader, writer, head + await reader.readexactly(length))
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", connections
    finally:
        listening.close()


def answering(*pieces: bytes, pause: float = 0.0) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return handle


async def ask(url: str, client: HttpClient | None = None, timeout: float = 5.0):
    client = client or HttpClient()
    try:
        return await client.request("POST", url, "/route", b'{"a": 1}', timeout)
    finally:
        await client.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 5\r\n\r", b"\nhe", b"llo"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nh", b"e\r\n3\r\nllo\r\n", b"0\r\n\r\n"],
    ],
)
async def test_a_body_arrives_whole_however_it_is_cut(pieces: list[bytes]):
    async with server(answering(*pieces, pause=0.01)) as (url, _):
        status, headers, content = await ask(url)
    assert (status, content) == (200, b"hello")
    assert "content-length" in headers or headers["transfer-encoding"] == "chunked"


async def test_a_body_without_a_length_ends_with_the_connection():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        writer.close()

    async with server(handle) as (url, _):
        assert (await ask(url)).content == b"hello"


async def test_the_request_carries_its_path_and_body():
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        seen.append(request)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async with server(handle) as (url, _):
        assert (await ask(f"{url}/v1")).status == 404
    assert seen[0].startswith(b"POST /v1/route HTTP/1.1\r\nHost: 127.0.0.1:")
    assert seen[0].endswith(b'\r\n\r\n{"a": 1}')


async def test_connections_are_kept_and_only_as_many_as_were_needed_at_once():
    async with server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", pause=0.02)) as (url, connections):
        client = HttpClient()
        for _ in range(3):
            await asyncio.gather(*[client.request("GET", url, "/", None, 5.0) for _ in range(4)])
        await client.close()
    assert connections == [3, 3, 3, 3]


async def test_a_server_that_closes_is_not_asked_on_that_connection_again():
    async with server(answering(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")) as (url, seen):
        client = HttpClient()
        for _ in range(3):
            assert (await client.request("GET", url, "/", None, 5.0)).status == 200
        await client.close()
    assert seen == [1, 1, 1]


async def test_a_kept_connection_that_broke_meanwhile_costs_nothing():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.transport.abort()

    async with server(handle) as (url, _):
        client = HttpClient()
        for _ in range(5):
            assert (await client.request("GET", url, "/", None, 5.0)).status == 200
        await client.close()


async def test_what_a_server_says_unasked_is_not_the_next_answer():
    told = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    unasked = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    async with server(answering(told, unasked, pause=0.02)) as (url, connections):
        client = HttpClient()
        for _ in range(3):
            assert (await client.request("GET", url, "/", None, 5.0)).status == 200
            await asyncio.sleep(0.05)
        await client.close()
    assert connections == [1, 1, 1]


async def test_an_answer_without_a_body_needs_no_length():
    async with server(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as (url, _):
        assert (await ask(url)).content == b""


async def test_an_answer_that_breaks_off_is_no_answer():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
        writer.close()

    async with server(handle) as (url, _):
        with pytest.raises(Unreachable):
            await ask(url)


async def test_what_is_not_http_is_said():
    async with server(answering(b"SSH-2.0 hello\r\n\r\n")) as (url, _):
        with pytest.raises(Unreachable, match="not HTTP"):
            await ask(url)


async def test_nobody_listening_is_unreachable():
    async with server(answering()) as (url, _):
        pass
    with pytest.raises(Unreachable):
        await ask(url)


async def test_an_answer_that_takes_too_long_is_a_timeout_and_its_connection_is_given_up():
    async with server(answering(b"HTTP/1.1 200 OK\r\n", pause=30.0)) as (url, connections):
        client = HttpClient()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await client.request("GET", url, "/", None, 0.05)
        await client.close()
    assert connections == [1, 1]


async def test_a_cancelled_request_leaves_no_connection_with_half_an_answer():
    async with server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok", pause=0.05)) as (url, seen):
        client = HttpClient()
        asking = asyncio.create_task(client.request("GET", url, "/", None, 5.0))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await client.request("GET", url, "/", None, 5.0)).content == b"ok"
        await client.close()
    assert seen == [1, 1]
