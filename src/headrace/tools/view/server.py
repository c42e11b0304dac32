"""The HTTP server of `headrace view`: who may ask, and what a browser may do with the answers.

The page is for the user who started the command. The URL that is printed has a token, which is exchanged for a cookie:
an `EventSource` cannot send headers, and the address bar should not keep the token. The cookie is `SameSite=Strict`, so
no other site can use it. A request must name this server in `Host`, so a web page that points its own name at this
machine (DNS rebinding) is refused. The content security policy allows scripts and requests of this server alone.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import BadInput
from headrace.tools.view.charts import read_page
from headrace.tools.view.events import FOLDER_POLL_S, FolderEvents, RunEvents, stream
from headrace.tools.view.routes import ROUTES, number
from headrace.tools.view.runs import NotFound, RunFolder, list_runs

log = logging.getLogger(__name__)

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
BUNDLES = {
    "page.css": ("vendor/uPlot.min.css", "style.css"),
    "page.js": (
        "vendor/preact.umd.js", "vendor/hooks.umd.js", "vendor/htm.umd.js", "vendor/uPlot.iife.min.js", "core.js",
        "parts.js", "chart.js", "heatmap.js", "maths.js", "tokens.js", "runs.js", "run.js", "step.js", "rollout.js",
        "credit.js", "draws.js", "evaluation.js", "compare.js", "app.js",
    ),
}  # fmt: skip
"""Files that are sent as one, in their order: a browser asks for six at a time, and each request costs milliseconds."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def page_files(mode: bytes = b"") -> dict[str, bytes]:
    """Return the files of the page by their path in it; `mode` is a script that runs before all others."""
    contents: dict[str, bytes] = {}

    def collect(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")
            elif not entry.name.endswith(".py"):
                contents[f"{prefix}{entry.name}"] = entry.read_bytes()

    collect(files("headrace.tools.view").joinpath("static"), "")
    bundles = {name: b"\n".join(contents.pop(part) for part in parts) for name, parts in BUNDLES.items()}
    return contents | bundles | {"page.js": mode + bundles["page.js"]}


class Gate:
    """ASGI middleware: refuses other hosts, methods and requests without the cookie; sets the headers of every answer.

    `names` are the accepted values of `Host`.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str], token: str, cookie: str) -> None:
        self._app, self._names, self._token, self._cookie = app, names, token, cookie
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> ASGIApp | None:
        """Return the answer to a request that does not reach the routes."""
        host = request.headers.get("host", "").lower()
        if host not in self._names:
            return error_reply(f"Host = {host[:100]!r}: not a name of this server. Open the printed URL.", 403)
        if request.method not in ("GET", "HEAD"):
            return error_reply(f"method = {request.method}: this server only reads. Use GET.", 405)
        token = request.query_params.get("token")
        if request.url.path == "/" and token is not None:
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return error_reply("token: not that of this server. Open the URL that `headrace view` printed.", 403)
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
            return redirect
        cookie = request.cookies.get(self._cookie, "")
        if not hmac.compare_digest(cookie.encode(), self._session.encode()):
            return error_reply("cookie: missing. Open the URL that `headrace view` printed.", 403)
        return None


def error_reply(text: str, status: int) -> Response:
    return json_reply({"error": text}, status)


def json_reply(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def make_app(folder: RunFolder, token: str, port: int, names: tuple[str, ...] = ()) -> ASGIApp:
    """Return the application; `names` are further names of this host that a browser may use."""
    static = page_files()

    async def index(request: Request) -> Response:
        return Response(static["index.html"], media_type=MEDIA_TYPES[".html"])

    async def static_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return error_reply("no such file", 404)
        kind = MEDIA_TYPES.get(PurePosixPath(name).suffix, "text/plain; charset=utf-8")
        return Response(static[name], media_type=kind)

    async def run_events(request: Request) -> Response:
        offset = request.headers.get("last-event-id") or request.query_params.get("offset")
        try:
            run = folder.run(request.path_params["run"])
            start = number({"offset": [offset or ""]}, "offset", None)
        except BadInput as error:
            return error_reply(str(error), 404)
        return stream(request, RunEvents(run, start))

    async def folder_events(request: Request) -> Response:
        return stream(request, FolderEvents(folder), FOLDER_POLL_S)

    routes = [
        Route("/", index),
        Route("/static/{name:path}", static_file),
        Route("/api/runs/{run}/events", run_events),
        Route("/api/events", folder_events),
    ]
    routes += [Route(path, _endpoint(answer, folder)) for path, answer in ROUTES.items()]
    hosts = frozenset(f"{name.lower()}:{port}" for name in (*LOOPBACK, *names))
    return Gate(Starlette(routes=routes), hosts, token, f"headrace_view_{port}")


def _endpoint(
    answer: Callable[[RunFolder, Mapping[str, Any], Mapping[str, list[str]]], Any], folder: RunFolder
) -> Callable[[Request], Response]:
    """Return an endpoint that Starlette calls in a thread: answers read files."""

    def endpoint(request: Request) -> Response:
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            return json_reply(answer(folder, request.path_params, query))
        except NotFound as error:
            return error_reply(str(error), 404)
        except BadInput as error:
            return error_reply(str(error), 400)
        except Exception as error:  # a damaged file; the page says which answer is missing
            log.exception("%s cannot be answered", request.url.path)
            return error_reply(f"{type(error).__name__}: {error}", 500)

    return endpoint


def read_first_page(folder: RunFolder) -> None:
    """Read what the first page shows into the caches of its runs, while the browser starts."""
    list_runs(folder)
    if folder.single:
        read_page(next(iter(folder.runs().values())).metrics)


def serve(folder: RunFolder, host: str, port: int, open_browser: bool, show: Callable[[str], None]) -> None:
    """Serve until interrupted; `show` is called with the URL as soon as the server accepts connections."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        fix = "Choose another, or leave it out for any free port."
        raise BadInput(f"cannot listen on {host}: {error.strerror}", key="--port", value=port, fix=fix) from error
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    url = f"http://{shown}:{port}/?token={token}"
    app = make_app(folder, token, port, (shown,))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own pool keeps what it has freed
    threading.Thread(target=read_first_page, args=[folder], daemon=True).start()
    show(url)
    if open_browser:
        webbrowser.open(url)
    server.run(sockets=[listener])
