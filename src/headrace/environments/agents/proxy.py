"""A local HTTP server with OpenAI's chat completions API, through which agents call the policy.

Each episode has its own URL with a secret in its path, so that episodes cannot be mixed up and other users of the
machine have no access. One server per process, on a free port, on the process's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.environments.agents.episode import (
    ChatRequest,
    Episode,
    EpisodeOver,
    ignored_settings,
    response_body,
    response_events,
)
from headrace.environments.base import Context, PromptTooLong
from headrace.inference.backend import InvalidRequest
from headrace.inference.server.replies import Handler, answering, on_bug, on_http_error, reply, unless_gone
from headrace.inference.server.request_bodies import LargeBodies, decode_body, read_body
from headrace.machine import raise_open_file_limit

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY_BYTES = 32 << 20
KEEP_ALIVE_S = 600
"""An idle connection stays open this long: tools may be slow."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
NO_RETRY = {"x-should-retry": "false"}
"""Stops OpenAI's client from retrying."""


class Proxy:
    """Serves the policy under the name `model`; requests for any other name get the policy, too."""

    def __init__(self, model: str, describe_tools: bool = True) -> None:
        self.model = model
        self._describe_tools = describe_tools
        self._episodes: dict[str, Episode] = {}
        self._reported: set[str] = set()
        """Settings of agents that are ignored, after the warning about them."""
        self._created = int(time.time())
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        raise_open_file_limit()  # each agent has its own connection, with both ends perhaps in this process
        self._large = LargeBodies()
        # Created as TCP: otherwise asyncio leaves Nagle's algorithm on, which delays each response by 40 ms.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind((HOST, 0))
        self._listener.listen(BACKLOG)
        self._server = _Server(self._app())
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.stopping.set()
            await self._serving
            self._server = self._serving = self._listener = None

    @contextlib.contextmanager
    def episode(self, context: Context) -> Iterator[Episode]:
        """Serve an episode at its `url` until the end of the block."""
        episode = Episode(context, self._describe_tools)
        self._episodes[episode.token] = episode
        try:
            yield episode
        finally:
            del self._episodes[episode.token]
            episode.close()

    def url(self, episode: Episode) -> str:
        """Return the `base_url` for an OpenAI client."""
        if self._listener is None:
            raise RuntimeError("the proxy is not running: call start() first")
        return f"http://{HOST}:{self._listener.getsockname()[1]}/episode/{episode.token}/v1"

    def _app(self) -> Starlette:
        base = "/episode/{token}/v1"
        routes = [
            Route(f"{base}/chat/completions", _handle_errors(self._chat), methods=["POST"]),
            Route(f"{base}/models", _handle_errors(self._models), methods=["GET"]),
            Route(f"{base}/models/{{name:path}}", _handle_errors(self._model), methods=["GET"]),
            Route(f"{base}/{{rest:path}}", _handle_errors(_not_found), methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_bug})

    async def _chat(self, http: HttpRequest) -> Response:
        episode = self._find_episode(http)
        async with read_body(http, MAX_BODY_BYTES, self._large) as content:
            request = decode_body(content, ChatRequest)
        if new := [name for name in ignored_settings(request) if name not in self._reported]:
            self._reported.update(new)
            log.warning("an agent sets %s: ignored, since the run decides how the policy is sampled", ", ".join(new))
        choices = await unless_gone(http.receive, episode.reply(request))
        if request.stream:
            return Response(response_events(request, choices, self.model), media_type="text/event-stream")
        return reply(response_body(request, choices, self.model))

    async def _models(self, http: HttpRequest) -> Response:
        self._find_episode(http)
        return reply({"object": "list", "data": [self._model_entry(self.model)]})

    async def _model(self, http: HttpRequest) -> Response:
        self._find_episode(http)
        return reply(self._model_entry(http.path_params["name"]))

    def _model_entry(self, name: str) -> dict[str, str | int]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}

    def _find_episode(self, http: HttpRequest) -> Episode:
        episode = self._episodes.get(http.path_params["token"])
        if episode is None:
            raise EpisodeOver
        return episode


def _handle_errors(handler: Handler) -> Handler:
    """Turn a handler's exceptions into errors in OpenAI's form."""

    async def handle(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except PromptTooLong as error:
            return _error(400, str(error), code="context_length_exceeded", param="messages")
        except InvalidRequest as error:
            return _error(400, str(error))
        except EpisodeOver as error:
            return _error(410, str(error), code="episode_over")

    return answering(handle)


async def _not_found(http: HttpRequest) -> Response:
    fact = f"/v1/{http.path_params['rest']} is not supported: only /v1/chat/completions and /v1/models are"
    return _error(404, f"{fact}. Configure the agent to use chat completions", code="not_found")


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": param}
    return reply({"error": error}, status, NO_RETRY)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, which waits for an event instead of polling."""

    def __init__(self, app: Starlette) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "date_header": False}
        super().__init__(uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, **quiet))
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
