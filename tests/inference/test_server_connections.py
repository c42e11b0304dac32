"""Clients that are slow, silent or too many, and pages of other hosts."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import pytest_asyncio

from headrace.config.inference import HttpConfig
from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.keys import Keys
from headrace.inference.server.app import LONG_BODY_BYTES
from headrace.inference.server.http_server import MAX_HEAD_BYTES
from headrace.inference.server.request_bodies import MAX_LARGE_BODIES
from tests.inference.serving import backend_of, chat_of, served

GENERATE = "/inference/v1/generate"
SMALL: dict[str, Any] = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
MB = 2**20
HURRIED = HttpConfig(header_timeout=0.3, body_timeout=0.3, idle_timeout=0.3)
KEY = {"Authorization": "Bearer client-key"}


@pytest_asyncio.fixture
async def backend(model: Any, model_directory: Path) -> EmbeddedBackend:
    return await backend_of(model, model_directory)


@asynccontextmanager
async def serving(
    backend: EmbeddedBackend, model_directory: Path, limits: HttpConfig | None = None, keys: Keys | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        served(backend, chat_of(model_directory), keys, max_body=4 * MB, limits=limits) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield http


class Wire:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, http: aiohttp.ClientSession) -> "Wire":
        url = urlsplit(str(http._base_url))
        return cls(*await asyncio.open_connection(url.hostname, url.port))

    async def send(self, *parts: str | bytes) -> None:
        for part in parts:
            self.writer.write(part.encode() if isinstance(part, str) else part)
        await self.writer.drain()

    async def answer(self) -> bytes:
        """Everything until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""
        finally:
            self.writer.close()


def head(path: str = GENERATE, length: int = 0, host: str = "localhost", more: str = "") -> str:
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{more}\r\n"


async def test_slow_senders_are_disconnected(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory, HURRIED, Keys(("client-key",))) as http:
        wires = {
            "": "",
            "POST /health HTTP/1.1\r\nHost: localhost\r\nX: ": "408",
            head(length=50, more="Authorization: Bearer client-key\r\n") + "{": "408",
            head(length=50) + "{": "401",  # the rest of a refused body is not waited for
            head(length=1) + "{": "401",
            head(length=1) + "{\r\n": "401",
        }
        connections = [await Wire.to(http) for _ in wires]
        for wire, sent in zip(connections, wires, strict=True):
            await wire.send(sent)
        for wire, status in zip(connections, wires.values(), strict=True):
            assert (await wire.answer())[9:12].decode() == status


async def test_a_sender_of_single_bytes_is_not_waited_for(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory, HURRIED) as http:
        for begin in ("", "POST", head("/health", length=10**6), head(length=10**6)):
            wire = await Wire.to(http)
            await wire.send(begin)
            reading = asyncio.create_task(wire.answer())
            while not reading.done():
                await asyncio.wait({reading}, timeout=0.05)
                wire.writer.write(b"x")


async def test_idle_connections_are_closed_and_others_are_kept(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory, HttpConfig(header_timeout=0.2, idle_timeout=0.5)) as http:
        wire = await Wire.to(http)
        await wire.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b'"status":"ok"' in await wire.answer()
        await backend.pause()
        asking = asyncio.create_task(post(http, SMALL))
        await asyncio.sleep(1.0)  # longer than every deadline: waiting for a result has none
        await backend.resume()
        assert await asking == 200


async def post(http: aiohttp.ClientSession, body: Any, **headers: str) -> int:
    async with http.post(GENERATE, json=body, headers=headers) as answer:
        return answer.status


async def test_stuck_large_bodies_do_not_block_others(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory) as http:  # with the default deadlines, of a minute
        wires = [await Wire.to(http) for _ in range(2 * MAX_LARGE_BODIES)]
        for wire in wires:
            await wire.send(head(length=3 * MB), b" " * 2 * MB)
        large = {**SMALL, "priority": "x" * 2 * MB}
        for body in (SMALL, large, large):
            assert await asyncio.wait_for(post(http, body), 30) == 200
        answers = [asyncio.create_task(wire.answer()) for wire in wires]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        for task in answers:
            assert not task.done() or task.result()[9:12] == b"408"
            task.cancel()


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has this limit")
async def test_a_client_that_does_not_read_is_disconnected(model: Any, model_directory: Path) -> None:
    backend = await backend_of(model, model_directory, max_model_len=LONG_BODY_BYTES)
    async with serving(backend, model_directory, HURRIED) as http:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            url = urlsplit(str(http._base_url))
            await loop.sock_connect(client, (url.hostname, url.port))
            body = b'{"prompt": "' + b"a" * MB + b'"}'
            await loop.sock_sendall(client, head("/tokenize", len(body)).encode() + body)
            mine = client.getsockname()
            while any(end.raddr == mine for end in psutil.Process().net_connections("tcp")):
                await asyncio.sleep(0.1)  # until the server has closed its end; the test's own limit is the deadline


async def test_of_too_many_connections_without_a_key_the_oldest_is_closed(
    backend: EmbeddedBackend, model_directory: Path
) -> None:
    limits, keys = HttpConfig(max_unauthenticated=4), Keys(("client-key",))
    async with serving(backend, model_directory, limits, keys) as http:
        async with http.post(GENERATE, json=SMALL, headers=KEY) as answer:
            assert answer.status == 200
        [mine] = [connection for held in http.connector._conns.values() for connection, _ in held]  # type: ignore
        without_key = [await Wire.to(http) for _ in range(3)]
        await without_key[0].send(head(more="Authorization: Bearer wrong\r\n"))
        assert (await without_key[0].reader.readline()).startswith(b"HTTP/1.1 401")
        without_key += [await Wire.to(http) for _ in range(3)]
        for client in without_key[:2]:
            await client.answer()
        for client in without_key[2:]:
            await client.send(head())
            assert (await client.reader.readline()).startswith(b"HTTP/1.1 401")
        assert mine.is_connected()
        async with http.post(GENERATE, json=SMALL, headers=KEY) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES, b"431"),
        (b"GET /" + b"x" * MAX_HEAD_BYTES, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, b""),  # pipelined
    ],
)
async def test_heads_are_small_valid_and_one_at_a_time(
    backend: EmbeddedBackend, model_directory: Path, sent: bytes, status: bytes
) -> None:
    async with serving(backend, model_directory) as http:
        wire = await Wire.to(http)
        await wire.send(sent)
        assert (await wire.answer())[9:12] == status


OTHERS = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": ""},
    {"Host": "[::1"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
]
OURS = [
    {"Host": "localhost:8000"},
    {"Host": "[::1]:8000"},
    {"Host": "127.1.2.3"},
    {"Origin": "http://localhost:3000"},
    {"Host": "Model.Example", "Origin": "https://model.example"},
]


async def test_pages_of_other_hosts_cannot_call_a_server_without_a_key(
    backend: EmbeddedBackend, model_directory: Path
) -> None:
    async with serving(backend, model_directory, HttpConfig(allowed_hosts=["model.example"])) as http:
        for headers, status in [*((each, 403) for each in OTHERS), *((each, 200) for each in OURS)]:
            assert await post(http, SMALL, **headers) == status, headers
            async with http.get("/health", headers=headers) as answer:
                assert answer.status == status, headers
        async with http.get("/health", headers=OTHERS[0]) as answer:
            message = (await answer.json())["error"]["message"]
            assert "evil.example" in message and "inference.http.allowed_hosts" in message


async def test_a_key_is_enough_under_every_name(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory, keys=Keys(("client-key",))) as http:
        for headers in OTHERS[:-2]:
            assert await post(http, SMALL, **KEY, **headers) == 200


async def test_nothing_is_redirected(backend: EmbeddedBackend, model_directory: Path) -> None:
    async with serving(backend, model_directory) as http:
        for path in ("/health/", "/v1/models/", "/v1/chat/completions/"):
            async with http.get(path, allow_redirects=False) as answer:
                assert answer.status == 404
                assert "Location" not in answer.headers
