"""The HTTP server around the routes: its socket, TLS, host names, and uvicorn with limits on its connections.

uvicorn limits only the time between two requests. Here the head of a request has a deadline and a maximum size, so has
the rest of a body that was refused, and a client that does not read its response is disconnected. Other bodies are
limited where they are read. Pipelined requests are refused: a disconnect would not cancel the first of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.config.base import ConfigError
from headrace.config.inference import HttpConfig
from headrace.errors import Failure
from headrace.inference.keys import Forbidden, is_loopback
from headrace.inference.schema import ErrorDetail, ErrorResponse
from headrace.inference.server.app import App
from headrace.inference.server.replies import error_reply

MAX_HEAD_BYTES = 1 << 16


class Connection(HttpToolsProtocol):
    """`is_client` checks an `Authorization` header; `unauthenticated` has all connections without one, oldest first."""

    def __init__(
        self,
        *,
        limits: HttpConfig,
        is_client: Callable[[str | None], bool],
        unauthenticated: dict[Connection, None],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._limits, self._is_client, self._unauthenticated = limits, is_client, unauthenticated
        # Until it sends a valid key. uvicorn passes the number on to the event loop.
        self.timeout_keep_alive = limits.header_timeout  # type: ignore[assignment]
        self._body_is_arriving = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family != socket.AF_UNIX:
            # The kernel ends a connection whose sent data is not read for so long.
            milliseconds = round(1000 * self._limits.body_timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._set_deadline(True)
        self._unauthenticated[self] = None
        if len(self._unauthenticated) > self._limits.max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unauthenticated.pop(self, None)
        self._unset_keepalive_if_required()
        self._set_deadline(False)

    def data_received(self, data: bytes) -> None:
        cycle, in_body = self.cycle, self._body_is_arriving
        super().data_received(data)
        if self.cycle is cycle and not in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
        self._set_deadline(self.cycle is None or self.cycle.response_complete)

    def on_headers_complete(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # a pipelined request
            return
        super().on_headers_complete()
        self._body_is_arriving, self._head_bytes = True, 0
        if self in self._unauthenticated:
            key = next((value.decode("latin-1") for name, value in self.headers if name == b"authorization"), None)
            if self._is_client(key):
                del self._unauthenticated[self]
                self.timeout_keep_alive = self._limits.idle_timeout  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body_is_arriving = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline(self._body_is_arriving)

    def shutdown(self) -> None:
        if self._body_is_arriving:  # perhaps for ever
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # not worth a line in the log: the request is answered as if it did not ask for an upgrade

    def _set_deadline(self, waits: bool) -> None:
        """Start the deadline for the rest of a head or of a refused body, unless it runs; end it if none is awaited."""
        if waits and self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_timeout, self._refuse_late_head)
        elif not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_late_head(self) -> None:
        if self._head_bytes:
            limit = self._limits.header_timeout
            self._refuse(408, f"the head of the request did not arrive within {limit:g} s (http.header_timeout)")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response is being sent, and close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = msgspec.json.encode(ErrorResponse(ErrorDetail(message, "invalid_request_error")))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


FIX = "Call it as 127.0.0.1, add the name to inference.http.allowed_hosts, or set an API key."
MAX_SHOWN_CHARS = 100
"""Characters of a name in an error message."""


class HostCheck:
    """ASGI middleware that refuses names other than those of this machine and `allowed`, while `is_open()`.

    A web page can point its own name at 127.0.0.1 and then call a server on this machine (DNS rebinding). Its requests
    carry the page's name in `Host` or `Origin`. A server with a key needs no such check: the page does not have it.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], is_open: Callable[[], bool]) -> None:
        self._app, self._is_open = app, is_open
        self._allowed = {name.lower() for name in allowed}
        self._accepts = functools.lru_cache(self._is_accepted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._is_open():
            headers = dict(scope["headers"])
            for header, value in (("Host", headers.get(b"host", b"")), ("Origin", headers.get(b"origin"))):
                if value is not None and not self._accepts(value):
                    shown = value.decode("latin-1")[:MAX_SHOWN_CHARS]
                    app = error_reply(Forbidden(f"{header} = {shown!r}: not a name of this server. {FIX}"))
        await app(scope, receive, send)

    def _is_accepted(self, value: bytes) -> bool:
        """Whether a host or an origin is this machine or allowed; its port is not compared."""
        text = value.decode("latin-1")
        try:
            name = urlsplit(text if "://" in text else f"//{text}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._allowed


class CannotListen(Failure):
    """The server cannot listen on its address."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet: connections are refused until the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    if error.errno == errno.EADDRINUSE:
        return CannotListen(f"inference.port = {port}: in use on {host}. Choose another, or 0 for any free port.")
    return CannotListen(f"inference.host = {host}, inference.port = {port}: cannot listen: {error.strerror}")


def check_tls(config: HttpConfig) -> None:
    """Raise `ConfigError` if the certificate or its key cannot be used."""
    if config.tls_certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_certificate,
            config.tls_key,
            password=lambda: b"",  # instead of a prompt on the terminal
        )
    except (OSError, ssl.SSLError) as error:
        fact = f"the certificate or its key cannot be used: {error}"
        fix = "Set this and inference.http.tls_key to files in PEM format."
        raise ConfigError(fact, key="inference.http.tls_certificate", value=config.tls_certificate, fix=fix) from error


class HttpServer(uvicorn.Server):
    """uvicorn with our connections, an event for when it listens, and without its signal handlers."""

    def __init__(self, app: App) -> None:
        limits = app.limits
        protocol = partial(Connection, limits=limits, is_client=lambda key: app.keys.is_client(key), unauthenticated={})
        super().__init__(
            uvicorn.Config(
                HostCheck(app.asgi(), limits.allowed_hosts, lambda: not app.keys.api),
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                log_level="error",  # else every malformed request is a line of the log
                access_log=False,
                lifespan="off",
                ssl_certfile=limits.tls_certificate,
                ssl_keyfile=limits.tls_key,
                timeout_graceful_shutdown=1,
            )
        )
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # two processes may bind one port; only the first can listen
            host, port = (sockets or [])[0].getsockname()[:2]
            raise _cannot_listen(host, port, error) from error
        self.listening.set()


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
