"""Exchanges over kept connections: bodies in all their forms, and servers that misbehave."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.inference.client.http import HttpClient, NotAStream, ServerUnreachable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(handle: Handler, socket: Path | None = None) -> AsyncIterator[tuple[str, list[int]]]:
    """Calls `handle` with each request's head and body; gives its URL, and the number of requests per connection."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(connections)
        connections.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                _, stated, rest = head.lower().partition(b"content-length: ")
                length = int(rest.split(b"\r\n")[0]) if stated else 0
                connections[number] += 1
                await handle(reader, writer, head + await reader.readexactly(length))
                await writer.drain()
        writer.close()

    if socket is not None:
        listening, url = await asyncio.start_unix_server(serve, socket), f"unix:{socket}"
    else:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield url, connections
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


async def test_a_timeout_that_ends_an_idle_connection_is_not_the_next_response():
    answered, closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await answered.wait()
        answered.clear()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        closed.set()

    async with server(handle) as (url, connections):
        client = HttpClient()
        for _ in range(3):
            assert (await client.request("GET", url, "/", None, 5.0)).status == 200
            answered.set()
            await asyncio.wait_for(closed.wait(), 5.0)
            closed.clear()
            await asyncio.sleep(0.02)
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
        with pytest.raises(ServerUnreachable):
            await ask(url)


async def test_a_response_that_is_not_http_is_unreachable():
    async with server(answering(b"SSH-2.0 hello\r\n\r\n")) as (url, _):
        with pytest.raises(ServerUnreachable):
            await ask(url)


async def test_a_closed_port_is_unreachable():
    async with server(answering()) as (url, _):
        pass
    with pytest.raises(ServerUnreachable):
        await ask(url)


async def test_an_answer_that_takes_too_long_is_a_timeout_and_its_connection_is_given_up():
    async with server(answering(b"HTTP/1.1 200 OK\r\n", pause=30.0)) as (url, connections):
        client = HttpClient()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await client.request("GET", url, "/", None, 0.5)  # enough to connect on a busy machine
        await client.close()
    assert connections == [1, 1]


async def test_a_cancelled_request_leaves_no_connection_with_half_an_answer():
    async with server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok", pause=0.05)) as (url, seen):
        client = HttpClient()
        asking = asyncio.create_task(client.request("GET", url, "/", None, 5.0))
        while seen != [1]:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await client.request("GET", url, "/", None, 5.0)).content == b"ok"
        await client.close()
    assert seen == [1, 1]


async def test_headers_are_sent_with_the_request():
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        seen.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with server(handle) as (url, _):
        client = HttpClient()
        await client.request("GET", url, "/", None, 5.0, {"Authorization": "Bearer key", "X-Other": "1"})
        await client.close()
    assert b"\r\nAuthorization: Bearer key\r\nX-Other: 1\r\n" in seen[0]


@pytest.fixture
def socket_directory():
    """A short path: the name of a socket has room for about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        yield Path(directory)


async def test_a_server_may_listen_on_a_socket_in_the_file_system(socket_directory: Path):
    handle = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    async with server(handle, socket_directory / "socket") as (url, connections):
        client = HttpClient()
        for _ in range(2):
            assert (await client.request("POST", url, "/route", b"{}", 5.0)).content == b"ok"
        await client.close()
    assert connections == [2]
    with pytest.raises(ServerUnreachable):
        await ask(f"unix:{socket_directory}/missing")


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def events(url: str, timeout: float = 5.0) -> list[bytes]:
    return [event async for event in HttpClient().stream("POST", url, "/route", b"{}", timeout)]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"Content-Length: 39\r\n\r\ndata: one\n\ndata:two\n\n", b"data: thr", b"ee\r\n\r\n: x"],
        [b"\r\ndata: one\n\n", b": a comment\n\nevent: x\ndata: two\n\ndata: three\n", b"\n"],
        [
            b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: one\n\nda"),
            chunk(b"ta: two\n\ndata: three\n\n") + chunk(b"data: [DONE]\n\n"),
            chunk(b"data: what follows counts for nothing\n\n"),
        ],
    ],
)
async def test_events_arrive_one_by_one_however_they_are_cut(pieces: list[bytes]):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        await answering(STREAM + pieces[0], *pieces[1:], pause=0.01)(reader, writer, request)
        writer.close()

    async with server(handle) as (url, _):
        assert await events(url) == [b"one", b"two", b"three"]


async def test_an_event_is_given_before_the_next_one_is_there():
    more = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: one\n\n"))
        await more.wait()
        writer.write(chunk(b"data: two\n\n") + b"0\r\n\r\n")

    async with server(handle) as (url, _):
        seen = []
        async for event in HttpClient().stream("POST", url, "/route", b"{}", 5.0):
            seen.append(event)
            more.set()
        assert seen == [b"one", b"two"]


async def test_events_of_several_lines_are_joined():
    async with server(answering(STREAM + b"Content-Length: 22\r\n\r\ndata: one\ndata: more\n\n")) as (url, _):
        assert await events(url) == [b"one\nmore"]


async def test_a_stream_that_is_refused_gives_the_servers_answer():
    said = b'{"error": {"message": "too long"}}'
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    async with server(answering(refusal)) as (url, _):
        with pytest.raises(NotAStream, match="too long") as refused:
            await events(url)
    assert refused.value.response[::2] == (400, said)


async def test_an_answer_that_is_no_stream_is_refused():
    async with server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) as (url, _):
        with pytest.raises(NotAStream):
            await events(url)


async def test_a_stream_that_breaks_off_differs_from_one_that_ends():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: one\n\n"))
        writer.close()

    async with server(handle) as (url, _):
        stream = HttpClient().stream("POST", url, "/route", b"{}", 5.0)
        assert await anext(stream) == b"one"
        with pytest.raises(ServerUnreachable):
            await anext(stream)


async def test_a_stream_may_take_longer_than_the_timeout_but_not_be_silent_for_it():
    pieces = [chunk(b"data: %d\n\n" % number) for number in range(4)]
    head = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
    async with server(answering(head, *pieces, b"0\r\n\r\n", pause=0.15)) as (url, _):
        assert len(await events(url, timeout=0.5)) == 4
    async with server(answering(head, *pieces, pause=30.0)) as (url, _):
        with pytest.raises(TimeoutError):
            await events(url, timeout=0.05)


async def test_leaving_a_stream_closes_its_connection():
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"data: one\n\n"))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()
        writer.close()

    async with server(handle) as (url, _):
        async with contextlib.aclosing(HttpClient().stream("POST", url, "/route", b"{}", 5.0)) as stream:
            assert await anext(stream) == b"one"
        await asyncio.wait_for(closed.wait(), 5.0)
        closed.clear()
        reading = asyncio.create_task(events(url))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait_for(closed.wait(), 5.0)
