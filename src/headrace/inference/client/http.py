"""HTTP requests and server-sent events over aiohttp's pooled connections.

A server is `http://HOST:PORT`, `https://HOST:PORT`, or `unix:/PATH/OF/A/SOCKET`. Left out: redirects, compression,
cookies, proxies, and the names, ids and reconnection of events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import aiohttp

Headers = Mapping[str, str] | None
UNIX = "unix:"
DONE = b"[DONE]"
"""The data of the last event, in OpenAI's format."""
KEEPALIVE_TIMEOUT_S = 60.0
"""How long idle connections are kept: shorter than our server does."""
UNIX_KEEPALIVE_TIMEOUT_S = 2.0
"""The same for vLLM's server, which closes idle connections after 5 s."""


class ServerUnreachable(OSError):
    """No response: the connection was refused or lost, or the response is not HTTP."""


class HttpResponse(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names are in lower case."""
    content: bytes


class NotAStream(Exception):
    """Events were requested and the server sent another `response`."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(f"HTTP {response.status} without events: {response.content[:200].decode(errors='replace')}")
        self.response = response


class HttpClient:
    """Sessions with any number of connections, one session for TCP and one for each Unix socket."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def request(
        self, method: str, base_url: str, route: str, body: bytes | None, timeout: float, headers: Headers = None
    ) -> HttpResponse:
        """Make one request within `timeout` seconds. Raises TimeoutError or `ServerUnreachable`."""
        limit = aiohttp.ClientTimeout(total=timeout)
        for attempt in range(2):
            try:
                async with self._send(method, base_url, route, body, limit, headers) as response:
                    return await _read(response)
            except TimeoutError:
                raise
            except aiohttp.ServerDisconnectedError as error:
                # The server may have closed a pooled connection while the request was sent: try once more.
                if attempt:
                    raise ServerUnreachable("the server closed the connection") from error
            except (aiohttp.ClientError, OSError) as error:
                raise ServerUnreachable(str(error) or type(error).__name__) from error
        raise AssertionError

    async def stream(
        self, method: str, base_url: str, route: str, body: bytes | None, timeout: float, headers: Headers = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the data of server-sent events without the closing `[DONE]`; `timeout` limits each silence.

        Raises TimeoutError, `ServerUnreachable` (also for a stream that breaks off) and `NotAStream`. A caller that
        leaves early must close the generator (`contextlib.aclosing`), which closes the connection.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        try:
            async with self._send(method, base_url, route, body, limit, headers) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    raise NotAStream(await _read(response))
                events = EventParser()
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        yield event
                    if events.done:
                        break
                response.close()  # the rest is not read
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    def _send(
        self, method: str, base_url: str, route: str, body: bytes | None, limit: aiohttp.ClientTimeout, headers: Headers
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request in the session of its Unix socket, or of TCP."""
        is_unix = base_url.startswith(UNIX)
        socket = base_url.removeprefix(UNIX) if is_unix else ""
        if socket not in self._sessions:
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(socket, limit=0, keepalive_timeout=UNIX_KEEPALIVE_TIMEOUT_S)
                if is_unix
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S)
            )
            self._sessions[socket] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "application/json", "Content-Type": "application/json"},
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        url = f"http://localhost{route}" if is_unix else base_url + route
        session = self._sessions[socket]
        return session.request(method, url, data=body, headers=headers, timeout=limit, allow_redirects=False)


class EventParser:
    """Splits a body that arrives in parts into events. `done`: the last event has been read."""

    def __init__(self) -> None:
        self.done = False
        self._line = b""
        """The incomplete last line."""
        self._data: list[bytes] = []
        """Lines of the current event."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ends in this part."""
        *lines, self._line = (self._line + part).split(b"\n")
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


async def _read(response: aiohttp.ClientResponse) -> HttpResponse:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status, headers, await response.read())
