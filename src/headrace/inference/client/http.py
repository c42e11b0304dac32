"""HTTP requests and server-sent events over aiohttp's pooled connections.

A server is `http://HOST:PORT`, `https://HOST:PORT`, or `unix:/PATH/OF/A/SOCKET`. Left out: redirects, compression,
cookies, proxies, and the names, ids and reconnection of events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import NamedTuple

import aiohttp

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
        self,
        method: str,
        base_url: str,
        route: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Make one request within `timeout` seconds. Raises TimeoutError or `ServerUnreachable`."""
        session, url = self._session(base_url), _url(base_url, route)
        limit = aiohttp.ClientTimeout(total=timeout)
        for attempt in range(2):
            try:
                async with session.request(
                    method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
                ) as response:
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
        self,
        method: str,
        base_url: str,
        route: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the data of server-sent events without the closing `[DONE]`; `timeout` limits each silence.

        Raises TimeoutError, `ServerUnreachable` (also for a stream that breaks off) and `NotAStream`. A caller that
        leaves early must close the generator (`contextlib.aclosing`), which closes the connection.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        session, url = self._session(base_url), _url(base_url, route)
        try:
            async with session.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
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

    def _session(self, base_url: str) -> aiohttp.ClientSession:
        key = base_url if base_url.startswith(UNIX) else ""
        if key not in self._sessions:
            connector: aiohttp.BaseConnector
            if key:
                path, keepalive = key.removeprefix(UNIX), UNIX_KEEPALIVE_TIMEOUT_S
                connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=keepalive)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S)
            self._sessions[key] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "application/json", "Content-Type": "application/json"},
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return self._sessions[key]


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


def _url(base_url: str, route: str) -> str:
    return f"http://localhost{route}" if base_url.startswith(UNIX) else base_url + route
