"""vLLM's routes for whoever runs it, as typed calls: pause, ask all workers, stamp a version, load adapters, count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.inference.backend import EngineError, EngineStopped
from headrace.inference.client.http import HttpClient, HttpResponse, ServerUnreachable
from headrace.inference.vllm.metrics import Metrics, read_metrics
from headrace.inference.vllm.wire import problem_of

PATIENCE = 600.0
"""Seconds that a call may take: a large model is loaded in less."""
GLANCE = 10.0
"""The same for its metrics."""


class Refusal(EngineError):
    """vLLM answered that it cannot do what it was asked for; the message is its own."""


class _Results(msgspec.Struct):
    results: list[Any] = []


class Control:
    """The line to one vLLM server. Every call raises `Refusal`, or `EngineStopped` where nobody answers."""

    def __init__(self, http: HttpClient, url: str) -> None:
        self.http = http
        self.url = url

    async def pause(self, *, forget: bool) -> None:
        """Hold all requests. With `forget` the cache is emptied, and what they had in it is computed again later."""
        await self._post(f"/pause?mode=keep&clear_cache={'true' if forget else 'false'}")

    async def resume(self) -> None:
        await self._post("/resume")

    async def on_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of our worker extension on all workers, between two steps.

        Of several copies of the model, the answers of the first are returned, but a failure of any is raised.
        """
        answer = await self._post("/collective_rpc", {"method": method, "args": arguments})
        try:
            return msgspec.json.decode(answer.content, type=_Results).results if answer.content else []
        except msgspec.DecodeError as error:
            raise Refusal(f"vLLM's answer about {method} cannot be read: {error}") from error

    async def stamp(self, version: str) -> bool:
        """Have vLLM say from here on that this version sampled; False where it does not know how."""
        try:
            await self._post("/update_weight_version", {"new_version": version})
        except _NoSuchRoute:
            return False
        return True

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def metrics(self) -> Metrics:
        answer = await self._ask("GET", "/metrics", None, GLANCE)
        try:
            return read_metrics(answer.content.decode())
        except (ValueError, OverflowError) as error:  # no text, or no numbers
            raise Refusal(f"vLLM's metrics cannot be read: {error}") from error

    async def _post(self, route: str, body: Any = None) -> HttpResponse:
        return await self._ask("POST", route, None if body is None else msgspec.json.encode(body), PATIENCE)

    async def _ask(self, method: str, route: str, body: bytes | None, timeout: float) -> HttpResponse:
        try:
            answer = await self.http.request(method, self.url, route, body, timeout)
        except TimeoutError as error:
            raise Refusal(f"vLLM did not answer {route} within {timeout:g} s") from error
        except ServerUnreachable as error:
            raise EngineStopped(f"vLLM cannot be reached: {error}") from error
        if answer.status == 404 and b'"detail"' in answer.content:  # a route, not an adapter, that does not exist
            raise _NoSuchRoute(f"this vLLM has no {route}")
        if answer.status != 200:
            raise Refusal(problem_of(answer.content))
        return answer


class _NoSuchRoute(Refusal):
    """This version of vLLM does not have it."""
