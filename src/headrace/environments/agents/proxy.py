"""An address on this machine that speaks OpenAI's chat completions, and answers as the policy of an episode.

Each episode has an address of its own, with a secret in its path, so that no two can be mixed up and nobody else on the
machine can ask. One server per process, on a port that the system chooses, on the process's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.environments.agents.episode import Episode, EpisodeOver
from headrace.environments.agents.replies import streamed, whole
from headrace.environments.agents.requests import ChatRequest, Complaints
from headrace.environments.base import Context, PromptTooLong
from headrace.inference.backend import InvalidRequest
from headrace.inference.server.replies import Handler, answering, body_of, on_bug, on_http_error, reply
from headrace.inference.server.streaming import unless_gone

HOST = "127.0.0.1"
MOST_BYTES = 32 << 20
LARGE_BODIES = 8
"""Large requests that are read at the same time."""
KEEP_ALIVE = 600
"""Seconds that a connection without requests stays open: tools may take long."""
MOST_FILES = 65_536
BACKLOG = 2048
"""Connections that may wait to be taken."""
FINAL = {"x-should-retry": "false"}
"""OpenAI's client then does not ask again what has been answered for good."""
SPOKEN = (
    "it speaks /v1/chat/completions and /v1/models alone; an agent that uses another interface must be told to chat"
)

_requests = msgspec.json.Decoder(ChatRequest)


class Proxy:
    """`model` is the name under which agents find the policy; they may ask for any other."""

    def __init__(self, model: str, describe_tools: bool = True) -> None:
        self.model = model
        self._describe_tools = describe_tools
        self._episodes: dict[str, Episode] = {}
        self._complaints = Complaints()
        self._created = int(time.time())
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        _allow_many_connections()
        self._large = asyncio.Semaphore(LARGE_BODIES)
        # Named as TCP, or asyncio would leave Nagle's algorithm on: it holds each answer up for 40 ms.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind((HOST, 0))
        self._listener.listen(BACKLOG)
        self._server = _Server(self._app())
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.told.set()
            await self._serving
            self._server = self._serving = self._listener = None

    @contextlib.contextmanager
    def episode(self, context: Context) -> Iterator[Episode]:
        """An episode that can be asked at `url` until the end of the block."""
        episode = Episode(context, self._describe_tools)
        self._episodes[episode.token] = episode
        try:
            yield episode
        finally:
            del self._episodes[episode.token]
            episode.close()

    def url(self, episode: Episode) -> str:
        """What an OpenAI client takes as its `base_url`."""
        if self._listener is None:
            raise RuntimeError("the proxy is not running: start() comes first")
        return f"http://{HOST}:{self._listener.getsockname()[1]}/episode/{episode.token}/v1"

    def _app(self) -> Starlette:
        base = "/episode/{token}/v1"
        routes = [
            Route(f"{base}/chat/completions", _answering(self._chat), methods=["POST"]),
            Route(f"{base}/models", _answering(self._models), methods=["GET"]),
            Route(f"{base}/models/{{name:path}}", _answering(self._one_model), methods=["GET"]),
            Route(f"{base}/{{rest:path}}", _answering(_not_spoken), methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_bug})

    async def _chat(self, http: HttpRequest) -> Response:
        episode = self._episode(http)
        async with body_of(http, _requests, MOST_BYTES, self._large) as request:
            self._complaints.hear(request)
        answers = await unless_gone(http.receive, episode.answer(request))
        if request.stream:
            return Response(streamed(request, answers, self.model), media_type="text/event-stream")
        return reply(whole(request, answers, self.model))

    async def _models(self, http: HttpRequest) -> Response:
        self._episode(http)
        return reply({"object": "list", "data": [self._entry(self.model)]})

    async def _one_model(self, http: HttpRequest) -> Response:
        self._episode(http)
        return reply(self._entry(http.path_params["name"]))

    def _entry(self, name: str) -> dict[str, str | int]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}

    def _episode(self, http: HttpRequest) -> Episode:
        episode = self._episodes.get(http.path_params["token"])
        if episode is None:
            raise EpisodeOver
        return episode


def _answering(handler: Handler) -> Handler:
    """Turn what a handler may raise into errors in OpenAI's form."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except PromptTooLong as error:
            return _refusal(400, str(error), code="context_length_exceeded", param="messages")
        except InvalidRequest as error:
            return _refusal(400, str(error))
        except EpisodeOver as error:
            return _refusal(410, str(error), code="episode_over")

    return answering(answer)


async def _not_spoken(http: HttpRequest) -> Response:
    return _refusal(404, f"/v1/{http.path_params['rest']} is not spoken here: {SPOKEN}", code="not_found")


def _refusal(status: int, message: str, code: str | None = None, param: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": param}
    return reply({"error": error}, status, FINAL)


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to whoever runs the process, and waits to be told to end instead of looking."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        self.told = asyncio.Event()

    async def main_loop(self) -> None:
        await self.told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_many_connections() -> None:
    """Each agent has a connection of its own, at both of whose ends this process may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
