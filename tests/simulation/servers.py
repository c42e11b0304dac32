"""A simulated inference server: requests share an engine whose decode steps take longer the more of them run."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.inference.client.http import ServerUnreachable
from headrace.inference.schema import (
    GenerateChoice,
    GenerateResponse,
    Health,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightVersionSpan,
)
from headrace.rollout.version import Version
from tests.simulation.network import Network, SimulatedHost

SLOTS = 32
"""Requests that an engine decodes together."""
STEP_S, STEP_PER_REQUEST_S = 0.010, 0.00025
"""Duration of a decode step, and by how much each running request makes it longer."""
BYTES_PER_TOKEN = 16
TOKENS = [5, 6, 7, 8]
"""A response carries these in place of thousands of tokens; time and size are those of thousands."""


def tokens_per_second(running: float, slowness: float) -> float:
    """Return the tokens per second of an engine with this many running requests."""
    return running / (slowness * (STEP_S + STEP_PER_REQUEST_S * running))


class Response(NamedTuple):
    status: int
    content: bytes
    size: int
    """The bytes that it would have with all tokens."""

    @classmethod
    def of(cls, message: msgspec.Struct) -> Response:
        content = msgspec.json.encode(message)
        return cls(200, content, len(content))


class _Request:
    def __init__(self, tokens: int, done: asyncio.Future[None], version: Version) -> None:
        self.tokens, self.done, self.first_version = tokens, done, version
        self.ends_at = 0.0
        """The decode steps that the engine has made when it ends."""
        self.has_slot = False


class Server:
    """One engine behind one URL. `fetch` waits for new weights, `checksum` returns that of published ones."""

    def __init__(
        self,
        network: Network,
        host: SimulatedHost,
        url: str,
        version: Version,
        fetch: Callable[[SimulatedHost], Awaitable[None]],
        checksum: Callable[[Path], str],
        rng: random.Random,
        mean_tokens: int,
    ) -> None:
        self.network, self.host, self.url, self.version = network, host, url, version
        self._fetch, self._checksum, self._rng, self._loop = fetch, checksum, rng, network.loop
        self._mean_tokens = mean_tokens
        self._running: list[tuple[float, int, _Request]] = []
        self._waiting: deque[_Request] = deque()
        self._numbers = itertools.count()
        self._steps = 0.0
        """Decode steps so far."""
        self._counted_at = self.began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._active = 0
        """Requests that have a slot of the engine."""
        self.decoding_s = 0.0
        """Time with at least one running request."""
        self.tokens = 0.0
        """Tokens decoded so far, those of aborted requests included."""

    # -- HTTP -----------------------------------------------------------------------------------------------------

    async def respond(self, route: str, body: bytes | None) -> Response:
        match route:
            case "/inference/v1/generate":
                return await self._generate()
            case "/update_weights":
                return await self._update(msgspec.json.decode(body or b"", type=UpdateWeightsRequest))
        raise AssertionError(route)

    def health(self) -> bytes:
        """Return the content of `/health`."""
        waiting = len(self._waiting)
        return msgspec.json.encode(Health("ok", str(self.version), "m", self._active, waiting, False, SLOTS, 16384, 9))

    async def _generate(self) -> Response:
        tokens = max(64, int(self._mean_tokens * min(3.0, self._rng.lognormvariate(-0.125, 0.5))))
        request = _Request(tokens, self._loop.create_future(), self.version)
        self._waiting.append(request)
        self._schedule()
        try:
            await request.done
        except asyncio.CancelledError:
            self._abort(request)
            raise
        first, last, half = str(request.first_version), str(self.version), len(TOKENS) // 2
        spans = [WeightVersionSpan(first, 0, len(TOKENS))]
        if first != last:
            spans = [WeightVersionSpan(first, 0, half), WeightVersionSpan(last, half, len(TOKENS))]
        choice = GenerateChoice(0, TOKENS, "stop", weight_versions=spans, flat_logprobs=[-0.5] * len(TOKENS))
        content = msgspec.json.encode(GenerateResponse("r", [choice]))
        return Response(200, content, tokens * BYTES_PER_TOKEN)

    async def _update(self, request: UpdateWeightsRequest) -> Response:
        version = Version(request.incarnation, request.step)
        try:
            checksum = self._checksum(Path(request.path))
        except FileNotFoundError as error:  # a trainer that went back has deleted it
            return Response(500, str(error).encode(), 100)
        if version != self.version:
            await self._fetch(self.host)
            self.version = version
        return Response.of(UpdateWeightsResponse(request.incarnation, request.step, checksum))

    def close(self) -> None:
        """End with all connections, as the kernel does for a killed process."""
        self._count()
        if self._timer is not None:
            self._timer.cancel()
        for request in [*self._waiting, *(request for _, _, request in self._running)]:
            self._release(request)
            if not request.done.done():
                request.done.set_exception(ServerUnreachable("the server closed the connection"))
        self._waiting.clear()
        self._running.clear()

    # -- the engine -----------------------------------------------------------------------------------------------

    def _step_s(self) -> float:
        return self.host.slowness * (STEP_S + STEP_PER_REQUEST_S * self._active)

    def _count(self) -> None:
        """Count the decode steps since the last change."""
        elapsed, self._counted_at = self._loop.time() - self._counted_at, self._loop.time()
        if self._active:
            steps = elapsed / self._step_s()
            self._steps += steps
            self.tokens += steps * self._active
            self.decoding_s += elapsed

    def _schedule(self) -> None:
        """Admit waiting requests, and set a timer for the first that ends."""
        self._count()
        while self._waiting and self._active < SLOTS:
            request = self._waiting.popleft()
            request.first_version = self.version
            request.ends_at = self._steps + request.tokens
            self._active, request.has_slot = self._active + 1, True
            heapq.heappush(self._running, (request.ends_at, next(self._numbers), request))
        while self._running and self._running[0][2].done.done():
            self._release(heapq.heappop(self._running)[2])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left = self._running[0][0] - self._steps
            self._timer = self._loop.call_later(left * self._step_s(), self._finish)

    def _finish(self) -> None:
        self._count()
        _, _, request = heapq.heappop(self._running)
        self._steps = max(self._steps, request.ends_at)
        self._release(request)
        if not request.done.done():
            request.done.set_result(None)
        self._timer = None
        self._schedule()

    def _abort(self, request: _Request) -> None:
        """End a request whose client has closed the connection."""
        self._count()
        if request in self._waiting:
            self._waiting.remove(request)
        self._release(request)  # its future is cancelled: `_schedule` removes it, perhaps before this
        self._schedule()

    def _release(self, request: _Request) -> None:
        self._active -= request.has_slot
        request.has_slot = False
