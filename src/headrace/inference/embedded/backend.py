"""The embedded engine behind the server: results cross from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.inference.backend import EngineState, EngineStopped, GenerationResult, TokenChunk
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.thread import SHUTTING_DOWN, EngineThread
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""Longest time for which another thread keeps the interpreter from the engine's: a step takes a few milliseconds."""
ADMIN_THREADS = 4
"""Threads of their own, so that a pause does not wait for tokenization or for weights that are read."""


class EmbeddedBackend:
    """A `Backend` over an engine's thread; must be created in the event loop that uses it."""

    name = "embedded"

    def __init__(self, thread: EngineThread) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = thread
        self._loop_calls = LoopCalls(asyncio.get_running_loop())
        self._admin = ThreadPoolExecutor(ADMIN_THREADS, "engine-admin")
        self._closed = False
        self.max_model_len = thread.engine.max_model_len
        self.vocab_size = thread.engine.vocab_size

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        urgent: bool = False,
        adapter: str | None = None,
        session: str | None = None,
    ) -> EmbeddedGeneration:
        """Submit a request; `session` has no effect with a single engine."""
        request = self._thread.submit(token_ids, params, cache_salt, urgent=urgent, adapter=adapter)
        return EmbeddedGeneration(request, self._thread, self._loop_calls)

    def state(self) -> EngineState:
        return self._thread.state()

    async def pause(self) -> None:
        await self._run_admin(self._thread.pause)

    async def resume(self) -> None:
        await self._run_admin(self._thread.resume)

    async def update_weights(self, directory: Path, version: Version) -> str:
        return await self._run_admin(lambda: self._thread.update_weights(directory, version))

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._run_admin(lambda: self._thread.load_adapter(name, directory))

    async def unload_adapter(self, name: str) -> None:
        await self._run_admin(lambda: self._thread.unload_adapter(name))

    async def failure(self) -> str:
        return await asyncio.shield(asyncio.wrap_future(self._thread.failure))  # cancelling a caller must not cancel it

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop)
        self._closed = True
        self._admin.shutdown(wait=False)

    async def _run_admin(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise EngineStopped(SHUTTING_DOWN)
        return await asyncio.get_running_loop().run_in_executor(self._admin, call)


class EmbeddedGeneration:
    """A request of the embedded engine, seen from the event loop."""

    def __init__(self, request: Request, thread: EngineThread, loop_calls: LoopCalls) -> None:
        self._request = request
        self._thread = thread
        self._ended = loop_calls.create_future()
        self._has_news = asyncio.Event()
        self._loop_calls = loop_calls
        request.future.add_done_callback(lambda _: loop_calls.call(self._end))

    async def result(self) -> GenerationResult:
        return await asyncio.shield(self._ended)  # a request is cancelled by `cancel` only

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        self._request.on_tokens = lambda: self._loop_calls.call(self._has_news.set)
        sent = 0
        while True:
            self._has_news.clear()
            ended = self._ended.done()
            if ended:
                self._ended.result()  # raises its error
            chunk = self._request.sampled_since(sent)
            if chunk.token_ids:
                sent += len(chunk.token_ids)
                yield chunk
            elif ended:
                return
            else:
                await self._has_news.wait()

    def cancel(self) -> None:
        if not self._request.future.done():
            self._thread.cancel(self._request)

    def _end(self) -> None:
        error = self._request.future.exception()
        if error is None:
            self._ended.set_result(self._request.future.result())
        else:
            self._ended.set_exception(error)
            self._ended.exception()  # marks it as retrieved: the caller may be gone
        self._has_news.set()


class LoopCalls:
    """Calls from the engine's thread to an event loop; all calls of one step share one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def create_future(self) -> asyncio.Future[GenerationResult]:
        return self._loop.create_future()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop, from any thread; without effect once the loop is closed."""
        self._calls.append(function)
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: later calls must wake the loop again
        while self._calls:
            self._calls.popleft()()
