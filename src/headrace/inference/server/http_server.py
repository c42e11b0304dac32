"""The HTTP server around the routes: its socket, TLS, and uvicorn with our connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn

from headrace.config.base import ConfigError
from headrace.config.inference import HttpConfig
from headrace.errors import Failure
from headrace.inference.server.app import App
from headrace.inference.server.connection import Connection


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
        raise ConfigError(
            f"the certificate or its key cannot be used: {error}",
            key="inference.http.tls_certificate",
            value=config.tls_certificate,
            fix="Set this and inference.http.tls_key to files in PEM format.",
        ) from error


class HttpServer(uvicorn.Server):
    """uvicorn with our connections, an event for when it listens, and without its signal handlers."""

    def __init__(self, app: App) -> None:
        limits = app.limits
        protocol = partial(Connection, limits=limits, is_client=lambda key: app.keys.is_client(key), unauthenticated={})
        super().__init__(
            uvicorn.Config(
                app.asgi(),
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
