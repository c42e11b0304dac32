"""An engine on a real socket with configurable responses, for failures between a client and its engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from headrace.inference.schema import (
    SESSION_HEADER,
    ChoiceLogprobs,
    GenerateChoice,
    GenerateResponse,
    Health,
    TokenLogprob,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightVersionSpan,
)
from headrace.inference.server.http_server import bind, url_of


class EngineStandIn:
    """`respond` makes the answer to a request to generate; None is the usual one, of a single token."""

    def __init__(
        self,
        respond: Callable[[], web.Response | None] = lambda: None,
        capacity: int = 8,
        listener: socket.socket | None = None,
    ) -> None:
        self.respond = respond
        self._listener = listener
        self.capacity = capacity
        self.asked = 0
        """Requests to generate."""
        self.keys: dict[str, set[str | None]] = {}
        """What `Authorization` said, by route."""
        self.sessions: list[str | None] = []
        self.hold: asyncio.Event | None = None
        """Answers wait for it, if there is one."""
        self.version = "0-0"
        """By its /health."""

    async def __aenter__(self) -> EngineStandIn:
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_post("/inference/v1/generate", self._generate)
        application.router.add_post("/update_weights", self._update)
        application.router.add_post("/pause", self._health)
        application.router.add_post("/resume", self._health)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self._runner.setup()
        listener = self._listener or bind("127.0.0.1", 0)
        await web.SockSite(self._runner, listener).start()
        self.url = url_of(listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.hold is not None:
            self.hold.set()
        await self._runner.cleanup()

    def _note(self, request: web.Request) -> None:
        self.keys.setdefault(request.path, set()).add(request.headers.get("Authorization"))

    async def _health(self, request: web.Request) -> web.Response:
        self._note(request)
        health = Health("ok", "0-0", "tiny", 0, 0, False, self.capacity, 64, 300)
        return _json(msgspec.to_builtins(health) | {"version": self.version})  # which may be none

    async def _update(self, request: web.Request) -> web.Response:
        self._note(request)
        body = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
        return _json(UpdateWeightsResponse(body.incarnation, body.step, "sum"))

    async def _generate(self, request: web.Request) -> web.Response:
        self._note(request)
        await request.read()
        self.sessions.append(request.headers.get(SESSION_HEADER))
        self.asked += 1
        answer = self.respond()
        if self.hold is not None:
            await self.hold.wait()
        return answer or _json(
            GenerateResponse(
                "r",
                [
                    GenerateChoice(
                        0,
                        [5],
                        "stop",
                        ChoiceLogprobs([TokenLogprob(5, -0.5, "token_id:5")]),
                        [WeightVersionSpan("0-0", 0, 1)],
                    )
                ],
            )
        )


def _json(body: msgspec.Struct | dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
