"""The HTTP server's end of the connection to the embedded engine, which runs in a process of its own. Without torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.inference import InferenceConfig
from headrace.inference.backend import (
    SHUTTING_DOWN,
    EngineOverloaded,
    EngineState,
    EngineStopped,
    Generation,
    GenerationResult,
    ModelNotFound,
    TokenChunk,
    check_request,
)
from headrace.inference.embedded import messages as m
from headrace.inference.memory import ColocatedTrainer
from headrace.inference.schema import SamplingParams
from headrace.inference.structured import grammar_of
from headrace.rollout.version import Version

ENGINE_PROGRAM = "headrace.inference.embedded.process"
EXIT_POLL_S = 0.01
CLOSE_TIMEOUT_S = 10.0
"""For the engine to end in order, before its process is killed."""
SILENCE_TIMEOUT_S, SILENCE_POLL_S = 60.0, 1.0
"""An engine that sends nothing for so long, not even its state, is considered dead."""


class EngineProcess:
    """The engine's process. It imports its libraries at once: create it before anything else that takes time."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", ENGINE_PROGRAM, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    async def wait(self) -> int:
        """Wait for its end and return its exit status."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(EXIT_POLL_S)
        return status

    def kill(self) -> None:
        self._process.kill()


async def start_embedded(
    config: InferenceConfig,
    directory: Path,
    shared: ColocatedTrainer | None,
    on_progress: Callable[[str], None] = lambda activity: None,
    process: EngineProcess | None = None,
) -> EmbeddedBackend:
    """Start the engine, in a new process if none is given, and wait until it is ready.

    Raises the error if it cannot load the model.
    """
    process = process or EngineProcess()
    process.connection.setblocking(False)
    process.connection.sendall(m.frame(m.Start(config.model_dump_json().encode(), directory, shared)))
    try:
        return await EmbeddedBackend.connect(process.connection, config.max_waiting, process, on_progress)
    except BaseException:
        process.kill()
        await process.wait()
        raise


class EmbeddedBackend(asyncio.Protocol):
    """A `Backend` over the connection to an engine; must be used in the event loop that it was created in."""

    name = "embedded"
    max_model_len: int
    vocab_size: int
    _transport: asyncio.WriteTransport
    _state: EngineState
    """The last snapshot."""

    def __init__(self, max_waiting: int, process: EngineProcess | None, on_progress: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._process, self._on_progress = process, on_progress
        self._max_waiting = max_waiting
        self._ready: asyncio.Future[m.Ready] = loop.create_future()
        self._dead: asyncio.Future[str] = loop.create_future()
        self._frames = m.Frames(m.FROM_ENGINE)
        self._numbers = itertools.count()
        self._generations: dict[int, EmbeddedGeneration] = {}
        self._calls: dict[int, asyncio.Future[str | None]] = {}
        self._heard_at = loop.time()
        self._disconnected = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        connection: socket.socket,
        max_waiting: int,
        process: EngineProcess | None = None,
        on_progress: Callable[[str], None] = lambda activity: None,
    ) -> EmbeddedBackend:
        """Wait until the engine at the other end of the connection is ready."""
        loop = asyncio.get_running_loop()
        _, backend = await loop.create_unix_connection(lambda: cls(max_waiting, process, on_progress), sock=connection)
        try:
            ready = await backend._ready
        except BaseException:
            backend._watching.cancel()
            backend._transport.abort()
            raise
        backend.max_model_len, backend.vocab_size, backend._state = ready.max_model_len, ready.vocab_size, ready.state
        return backend

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
        self._refuse_if_stopped()
        check_request(token_ids, params, self.vocab_size, self.max_model_len)
        if params.structured_outputs is not None:
            grammar_of(params.structured_outputs)  # raises before a stream begins
        if adapter is not None and adapter not in self._state.adapters:
            raise ModelNotFound(f"adapter {adapter!r} is not loaded")
        limit = self._state.capacity + self._max_waiting
        if len(self._generations) >= limit:
            raise EngineOverloaded(f"{limit} requests are running or waiting, which is the limit. Retry later.")
        number = next(self._numbers)
        self._transport.write(m.frame(m.Submit(number, token_ids, params, cache_salt, urgent, adapter)))
        self._generations[number] = generation = EmbeddedGeneration(number, self._transport)
        return generation

    def state(self) -> EngineState:
        """Return the engine's last snapshot; requests that it has not received yet count as waiting."""
        state = msgspec.structs.replace(self._state)
        state.running = min(state.running, len(self._generations))
        state.waiting = len(self._generations) - state.running
        state.max_requests = state.capacity + self._max_waiting
        state.failure = self._dead.result() if self._dead.done() else None
        return state

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, directory: Path, version: Version) -> str:
        checksum = await self._call("update_weights", directory=directory, version=version)
        assert checksum is not None
        return checksum

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._call("load_adapter", name=name, directory=directory)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name=name)

    async def failure(self) -> str:
        return await asyncio.shield(self._dead)  # cancelling a caller must not cancel it

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._watching.cancel()
            self._transport.write(m.frame(m.Close()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._disconnected.wait()
        self._transport.abort()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(TimeoutError):  # a process that waits for a dead mount may not end
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._process.wait()

    async def _call(self, method: m.Method, **arguments: Any) -> str | None:
        """Call a method in the engine's process; cancelling the caller does not cancel the call."""
        self._refuse_if_stopped()
        number = next(self._numbers)
        self._transport.write(m.frame(m.Call(number, method, **arguments)))
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        return await answer

    def _refuse_if_stopped(self) -> None:
        if self._dead.done():
            raise EngineStopped(self._dead.result())
        if self._is_closed:
            raise EngineStopped(SHUTTING_DOWN)

    # The event loop calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        """Handle the messages that are complete with this content."""
        self._heard_at = asyncio.get_running_loop().time()
        for message in self._frames.feed(content):
            match message:
                case m.Finished(number, result):
                    self._end(number, result)
                case m.Tokens(number, chunk):
                    if number in self._generations:
                        self._generations[number].add(chunk)
                case m.State(state):
                    self._state = state
                    if state.failure is not None:
                        self._die(state.failure)
                case m.Failed(number, error):
                    self._end(number, error.exception())
                case m.Answer(number, value, error):
                    answer = self._calls.pop(number, None)
                    if answer is None or answer.done():
                        continue  # the engine died before, or the caller was cancelled
                    if error is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(error.exception())
                case m.Starting(activity):
                    self._on_progress(activity)
                case m.Ready():
                    self._ready.set_result(message)
                case m.CannotStart(error):
                    self._ready.set_exception(error.exception())

    def connection_lost(self, error: Exception | None) -> None:
        self._disconnected.set()
        if self._is_closed:
            self._end_all(EngineStopped(SHUTTING_DOWN))

    def _end(self, number: int, outcome: GenerationResult | Exception) -> None:
        """End a request, unless it ended with the engine."""
        if (generation := self._generations.pop(number, None)) is not None:
            generation.end(outcome)

    async def _watch(self) -> None:
        """Wait for the end of the engine's process, or until it is silent for too long."""
        loop = asyncio.get_running_loop()
        while not self._disconnected.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_POLL_S):
                    await self._disconnected.wait()
            if self._ready.done() and loop.time() - self._heard_at > SILENCE_TIMEOUT_S:
                self._die(f"the engine's process has not responded for {SILENCE_TIMEOUT_S:g} s")
                return
        status = 0 if self._process is None else await self._process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        self._die(f"the engine's process {how}")

    def _die(self, reason: str) -> None:
        """Record why the engine is dead, and end everything that waits for it."""
        if not self._dead.done():
            self._dead.set_result(reason)
        if not self._ready.done():
            self._ready.set_exception(EngineStopped(reason))
        self._end_all(EngineStopped(reason))

    def _end_all(self, error: EngineStopped) -> None:
        """End all requests and calls with an error."""
        for generation in self._generations.values():
            generation.end(error)
        self._generations.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._calls.clear()


class EmbeddedGeneration(Generation):
    """A request of the embedded engine."""

    def __init__(self, number: int, transport: asyncio.WriteTransport) -> None:
        super().__init__()
        self._number, self._transport = number, transport

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        if not self._ended.done():
            self._transport.write(m.frame(m.Follow(self._number)))
        received = 0
        async for chunk in super().chunks():
            received += len(chunk.token_ids)
            yield chunk
        rest = self._ended.result()
        if received < len(rest.token_ids):  # those of the last step come with the result
            tops = None if rest.top_logprobs is None else rest.top_logprobs[received:]
            yield TokenChunk(rest.token_ids[received:], rest.logprobs[received:], tops)

    def cancel(self) -> None:
        if not self._ended.done():
            self._transport.write(m.frame(m.Cancel(self._number)))
