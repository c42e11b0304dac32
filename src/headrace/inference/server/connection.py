"""One HTTP connection: uvicorn's protocol with deadlines, and a limit on connections that have not sent a key.

uvicorn limits only the time between two requests. Here the head of a request has a deadline and a maximum size, so has
the rest of a body that was refused, and a client that does not read its response is disconnected. Other bodies are
limited where they are read. Pipelined requests are refused: a disconnect would not cancel the first of them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.config.inference import HttpConfig
from headrace.inference.schema import ErrorDetail, ErrorResponse

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
        self._expect(True)
        self._unauthenticated[self] = None
        if len(self._unauthenticated) > self._limits.max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unauthenticated.pop(self, None)
        self._unset_keepalive_if_required()
        self._expect(False)

    def data_received(self, data: bytes) -> None:
        cycle, in_body = self.cycle, self._body_is_arriving
        super().data_received(data)
        if self.cycle is cycle and not in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
        self._expect(self.cycle is None or self.cycle.response_complete)

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
        self._expect(self._body_is_arriving)

    def shutdown(self) -> None:
        if self._body_is_arriving:  # perhaps for ever
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # not worth a line in the log: the request is answered as if it did not ask for an upgrade

    def _expect(self, more: bool) -> None:
        """Start the deadline for the rest of a head or of a refused body, unless it runs; or end it."""
        if more and self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_timeout, self._expire)
        elif not more and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
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
