"""A server with OpenAI's chat API on a real socket, with configurable responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

Respond = Callable[[dict[str, Any]], web.Response | str]


class OpenAIStandIn:
    """`respond` makes the answer to a request: a text, or a whole response. `asked` has the requests, in order."""

    def __init__(self, respond: Respond = lambda asked: "Score: 1") -> None:
        self.respond = respond
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.entries: list[dict[str, Any]] = [{"id": "small"}, {"id": "large", "owned_by": "us"}]
        self.hold: asyncio.Event | None = None
        """Answers wait for it, if there is one."""

    async def __aenter__(self) -> OpenAIStandIn:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.hold is not None:
            self.hold.set()
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        self.asked.append(await request.json())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.hold is not None:
                await self.hold.wait()
            answer = self.respond(self.asked[-1])
        finally:
            self.at_once -= 1
        return answer if isinstance(answer, web.Response) else web.json_response(completion(answer))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.entries})


def completion(text: str, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def error(status: int, message: str, **headers: str) -> web.Response:
    body = {"error": {"message": message, "type": "whatever"}}
    return web.json_response(body, status=status, headers={name.replace("_", "-"): v for name, v in headers.items()})
