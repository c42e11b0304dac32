"""Checks of the `Host` and `Origin` headers, for servers without an API key.

A web page can point its own name at 127.0.0.1 and then call a server on this machine (DNS rebinding). Its requests
carry the page's name in `Host`, or in `Origin`, so only names of this machine and those that are configured are
accepted. A server with a key needs no such check, since the page does not have the key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.inference.server.keys import Forbidden, is_loopback
from headrace.inference.server.replies import error_reply

FIX = "Call it as 127.0.0.1, add the name to inference.http.allowed_hosts, or set an API key."
MAX_SHOWN_CHARS = 100
"""Characters of a name in an error message."""


class HostCheck:
    """ASGI middleware that refuses names other than those of this machine and `allowed`, while `is_open()`."""

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
