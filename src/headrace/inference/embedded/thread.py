"""The thread that owns an engine: it steps while there is work and sleeps otherwise, woken by whoever brings some."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import EngineError, EngineStopped, Request, Result
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import PublishedWeights, marker_of
from headrace.rollout.version import Version

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """An engine that runs by itself. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._updating = threading.Lock()
        self._loaded: tuple[Version, str] | None = None
        """The version that was installed last, and its checksum."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self, token_ids: list[int], params: SamplingParams, cache_salt: str | None = None, *, urgent: bool = False
    ) -> Request:
        """Put a request in line; raises `InvalidRequest` for one that can never be served."""
        with self._wake:
            self._refuse_if_stopping()
            request = self.engine.submit(token_ids, params, cache_salt, urgent=urgent)
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        with self._wake:
            self.engine.cancel(request)
            self._wake.notify()

    def pause(self) -> None:
        """Let the step in progress end, then hold all requests where they are. Returns once they stand still."""
        self._call(lambda: setattr(self.engine, "paused", True))

    def resume(self) -> None:
        self._call(lambda: setattr(self.engine, "paused", False))

    def update_weights(self, directory: Path, version: Version) -> str:
        """Go on with a published version from the next step on; returns its checksum.

        The files are read on the caller's thread, so that sampling continues meanwhile. What is loaded already is not
        read again: a caller who got no answer may repeat the call.
        """
        with self._updating:
            self._refuse_if_stopping()
            marker = marker_of(directory, version)
            if self._loaded == (version, marker.checksum):
                return marker.checksum
            published = self.engine.read(directory, version)
            self._call(lambda: self._install(published))
            return published.checksum

    def stop(self) -> None:
        """End the thread; requests in flight get `EngineStopped`, and weights on their way do not arrive."""
        self.engine.link.close()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _install(self, published: PublishedWeights) -> None:
        self._loaded = None  # should it fail halfway
        self.engine.install(published)
        self._loaded = (published.version, published.checksum)

    def _call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, and wait for it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            self._refuse_if_stopping()
            self._calls.append(run)
            self._wake.notify()
        return future.result()

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise EngineStopped("the engine is shutting down")

    def _run(self) -> None:
        while not self._stopping:
            while self._calls:
                self._calls.popleft()()
            self._step()
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._calls or self.engine.has_work)
        while self._calls:
            self._calls.popleft()()
        self.engine.fail_all(EngineStopped("the engine is shutting down"))

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # a thread that died here would leave every caller waiting forever
            log.exception("a step failed outside any request; all requests end with an error")
            self.engine.fail_all(EngineError(f"the engine's step failed: {type(error).__name__}: {error}"))


class Courier:
    """Brings results from the engine's thread to an event loop: all that end in one step share one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[asyncio.Future[Result], Future[Result]]] = deque()
        self._called = False

    def expect(self, request: Request) -> asyncio.Future[Result]:
        """The request's future, for this loop."""
        expected: asyncio.Future[Result] = self._loop.create_future()
        request.future.add_done_callback(lambda done: self._arrive(expected, done))
        return expected

    def _arrive(self, expected: asyncio.Future[Result], done: Future[Result]) -> None:
        self._arrived.append((expected, done))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: whatever arrives from here on calls again
        while self._arrived:
            expected, done = self._arrived.popleft()
            if expected.done():
                continue
            error = done.exception()
            if error is None:
                expected.set_result(done.result())
            else:
                expected.set_exception(error)
