"""The orchestrator's line to the engines: typed calls, typed errors, and what is tried again.

Sampling and scoring change nothing on an engine, so a request that got no answer may be made again, of another engine
first: where none could be reached, also behind a gateway (502, 504), was about to end (503) or had no room (429), for
`retry_for` seconds after the first failure; where none answered in time, once of every other engine, since the same one
would take as long again. What an engine answered is final: a request that it refuses or fails at would fare no better
elsewhere. Weights are the same whoever asks for them twice. Which engine is asked is the pool's decision.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.inference.client.completion import Completion, Scores, read_completion, read_scores
from headrace.inference.client.errors import (
    EngineBusy,
    EngineCallError,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    failure_of,
)
from headrace.inference.client.http import HttpClient, Unreachable
from headrace.inference.client.pool import Pool, PooledEngine
from headrace.inference.client.tries import FIRST_RETRY, LONGEST_RETRY, NOBODY, Tries
from headrace.inference.schema import (
    SCHEMA_HEADER,
    SESSION_HEADER,
    GenerateRequest,
    Health,
    SamplingParams,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
)
from headrace.rollout.batch import SCHEMA
from headrace.rollout.version import Version
from headrace.transport.endpoint import Endpoint, read_endpoints

T = TypeVar("T")
K = TypeVar("K")
Read = Callable[[bytes], T]
"""Makes a result of an answer's body. Raises `msgspec.DecodeError` or ValueError where it is none."""

_read_health = msgspec.json.Decoder(Health).decode
_read_acknowledgement = msgspec.json.Decoder(UpdateWeightsResponse).decode

HEALTH_TIMEOUT = 5.0
LOOK = 3.0
"""Seconds between two looks at how the engines are, as long as they are asked for anything."""
READ_AGAIN = 0.05
"""Seconds for which what was read about their addresses holds, whoever may have failed meanwhile."""


class EngineClient:
    """One or more engines behind one interface. Make and use it inside one event loop.

    `engines` is a list of base URLs, the directory of a run's endpoints, or a function that gives the URLs that hold.
    The keys are for URLs; an endpoint has its own.
    """

    def __init__(
        self,
        engines: Sequence[str] | Path | Callable[[], Sequence[str]],
        *,
        timeout: float = 600.0,
        retry_for: float = 60.0,
        api_key: str | None = None,
        admin_key: str | None = None,
    ) -> None:
        self._endpoints = _endpoints(engines, api_key, admin_key)
        self._read_at = -math.inf
        self._look_at = -math.inf
        self._looking: asyncio.Task[object] | None = None
        self._timeout = timeout
        self._retry_for = retry_for
        self._pool = Pool()
        self._http = HttpClient()

    def join(self, session: str) -> None:
        """One more conversation of a session begins: all of a session prefer the engine that caches their prompt."""
        self._pool.join(session)

    def leave(self, session: str) -> None:
        self._pool.leave(session)

    async def generate(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        cache_salt: str | None = None,
        session: str | None = None,
    ) -> Completion:
        """Sample one completion."""
        sampling = msgspec.structs.replace(sampling, logprobs=0)
        body = GenerateRequest(token_ids=token_ids, sampling_params=sampling, cache_salt=cache_salt)
        return await self._call_one("/inference/v1/generate", body, read_completion, session)

    async def score(self, token_ids: list[int], temperature: float = 1.0, *, urgent: bool = False) -> Scores:
        """The logprob of every token after those before it, computed anew. An engine needs room for one token more."""
        # A seed of its own: the engine's other requests sample as if this one had not been.
        sampling = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0, seed=0)
        body = GenerateRequest(token_ids=token_ids, sampling_params=sampling, urgent=urgent)
        return await self._call_one("/inference/v1/generate", body, partial(read_scores, token_ids=token_ids))

    async def health(self) -> list[Health]:
        """How each engine is, asked once: an engine that does not answer raises."""
        engines = self._current()
        return list(await asyncio.gather(*[self._ask_health(engine) for engine in engines]))

    async def answering(self) -> dict[str, Health]:
        """How those engines are that answer, by address; asked once."""
        return await self._hear(self._current())

    async def wait_ready(self, deadline: float, at_least: int = 1) -> list[Health]:
        """Wait at most `deadline` seconds until every engine answers, and there are as many as expected."""

        async def attempt() -> list[Health]:
            engines = await self.health()
            if len(engines) < at_least:
                raise EngineUnavailable(f"{len(engines)} of {at_least} inference servers are up")
            return engines

        return await self._persist(attempt, deadline, (EngineUnavailable, EngineTimeout))

    async def pause(self) -> None:
        """Hold all requests where they are, on every engine."""
        await self._call_all("/pause", None, _read_health)

    async def resume(self) -> None:
        await self._call_all("/resume", None, _read_health)

    async def update_weights(self, path: Path, version: Version, engines: Collection[str] | None = None) -> str:
        """Move every engine to a published version; returns the checksum that they all acknowledge.

        One that cannot be reached is left out, after a few tries, if there are others. With `engines` only those, which
        are asked once.
        """
        body = UpdateWeightsRequest(_absolute(path), version.incarnation, version.step)
        answers = await self._call_all("/update_weights", body, _read_acknowledgement, engines)
        checksums = {answer.checksum for answer in answers}
        if len(checksums) != 1 or any(Version(a.incarnation, a.step) != version for a in answers):
            raise EngineFailed(f"engines acknowledge different weights for version {version}: {answers}")
        return checksums.pop()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._http.close()

    async def _call_one(self, route: str, body: msgspec.Struct, read: Read[T], session: str | None = None) -> T:
        """Ask the session's engine, or the one with the least to do, and others where that gives no answer."""
        tries = Tries(self._retry_for)
        self._look_around()
        while True:
            engine = self._pool.choose(session, time.monotonic(), tries.avoided)
            if engine is None:
                await asyncio.sleep(tries.pause(self._pool.engines.values(), time.monotonic()))
                self._read_endpoints()
                self._look_around()
                continue
            try:
                return await self._attempt(engine, route, body, read, session)
            except (EngineUnavailable, EngineBusy, EngineTimeout) as error:
                tries.fail(engine, error, time.monotonic())
                self._read_endpoints()  # it may have come back elsewhere
            except EngineRejected:
                self._read_endpoints()
                if self._pool.engines.get(engine.url) is engine:
                    raise
                # Else another process is there now, which wants another key.

    async def _attempt(
        self, engine: PooledEngine, route: str, body: msgspec.Struct, read: Read[T], session: str | None
    ) -> T:
        """One request, and what it says of the engine. A long time says nothing: whether it lives, /health tells."""
        engine.in_flight += 1
        try:
            answer = await self._request(engine.url, route, body, read, self._timeout, session=session)
        except EngineUnavailable as error:
            self._pool.unreachable(engine, str(error), time.monotonic())
            raise
        except EngineBusy as error:
            self._pool.busy(engine, str(error), time.monotonic() + error.pause)
            raise
        except EngineFailed as error:
            self._pool.failed(engine, str(error), time.monotonic())
            raise
        finally:
            engine.in_flight -= 1
        self._pool.answered(engine)
        return answer

    async def _call_all(
        self, route: str, body: msgspec.Struct | None, read: Read[T], engines: Collection[str] | None = None
    ) -> list[T]:
        """Ask every engine until it has answered, or some engines once. Each such call may be repeated without harm.

        Those that nobody asks for anything, because they keep failing, are not waited for while there are others.
        """
        answers: dict[str, T] = {}

        def wanted() -> list[str]:
            known = self._current()
            able = [engine.url for engine in known if engine.breaker.is_closed or engine.url in answers]
            return able or [engine.url for engine in known]

        async def attempt() -> list[T]:
            urls = wanted() if engines is None else engines
            left = [url for url in urls if url not in answers]
            new, failures = await _ask(left, lambda url: self._command(url, route, body, read))
            answers.update(new)
            if failures:  # first of all one that another try would not mend
                raise min(failures.values(), key=lambda failure: isinstance(failure, EngineUnavailable))
            return [answers[url] for url in urls]

        return await self._persist(attempt, self._retry_for, (EngineUnavailable,) if engines is None else ())

    async def _command(self, url: str, route: str, body: msgspec.Struct | None, read: Read[T]) -> T:
        """One request that changes an engine; if it cannot be reached, that is remembered."""
        try:
            return await self._request(url, route, body, read, self._timeout, admin=True)
        except EngineUnavailable as error:
            if (engine := self._pool.engines.get(url)) is not None:
                self._pool.unreachable(engine, str(error), time.monotonic())
            raise

    async def _persist(
        self, attempt: Callable[[], Awaitable[T]], seconds: float, worth: tuple[type[EngineCallError], ...]
    ) -> T:
        """Try until it works or the time is over, as long as the error is worth another try."""
        deadline = time.monotonic() + seconds
        delay = FIRST_RETRY
        while True:
            try:
                return await attempt()
            except worth as error:
                if time.monotonic() + delay > deadline:
                    raise type(error)(f"{error} (tried for {seconds:g} s)") from error
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY)

    def _look_around(self) -> None:
        """Once in a while: who there is, and how they are, beside the call that thinks of it."""
        now = time.monotonic()
        if now >= self._look_at and (self._looking is None or self._looking.done()):
            self._read_endpoints()
            self._looking = asyncio.create_task(self._hear(self._pool.to_be_heard(now)))

    async def _hear(self, engines: Sequence[PooledEngine]) -> dict[str, Health]:
        """Ask these for their report, and remember it."""
        now = time.monotonic()
        self._look_at = now + LOOK
        for engine in engines:
            engine.breaker.begin_trial(now)
        answers, failures = await _ask(engines, self._ask_health)
        for engine, health in answers.items():
            self._pool.report(engine, health)
        for engine, error in failures.items():
            if isinstance(error, EngineUnavailable | EngineTimeout):
                self._pool.unreachable(engine, str(error), time.monotonic())
        return {engine.url: health for engine, health in answers.items()}

    async def _ask_health(self, engine: PooledEngine) -> Health:
        return await self._request(engine.url, "/health", None, _read_health, HEALTH_TIMEOUT)

    def _current(self) -> Sequence[PooledEngine]:
        """All that there are, as of now."""
        self._read_at = -math.inf
        self._read_endpoints()
        if not self._pool.engines:
            raise EngineUnavailable(NOBODY)
        return list(self._pool.engines.values())

    def _read_endpoints(self) -> None:
        now = time.monotonic()
        if now - self._read_at > READ_AGAIN:
            self._read_at = now
            self._pool.update(self._endpoints())

    async def _request(
        self,
        url: str,
        route: str,
        body: msgspec.Struct | None,
        read: Read[T],
        timeout: float,
        *,
        admin: bool = False,
        session: str | None = None,
    ) -> T:
        """One HTTP exchange, its failures told apart. `admin`: one that changes the engine, and needs that key."""
        engine = self._pool.engines.get(url)
        headers = {} if engine is None else engine.admin_headers if admin else engine.headers
        if session is not None:  # by a name that a header can hold
            headers = {**headers, SESSION_HEADER: f"{zlib.crc32(session.encode()):08x}"}
        method = "POST" if admin or body is not None else "GET"
        data = None if body is None else msgspec.json.encode(body)
        try:
            status, told, content = await self._http.request(method, url, route, data, timeout, headers)
        except TimeoutError as error:
            raise EngineTimeout(f"{url}{route} gave no answer within {timeout:g} s") from error
        except Unreachable as error:
            raise EngineUnavailable(f"the engine at {url} cannot be reached: {error}") from error
        try:
            _check_schema(told.get(SCHEMA_HEADER.lower()))
            if status == 200:
                return read(content)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineFailed(f"the answer of {url}{route} cannot be used: {error}") from error
        raise failure_of(url, status, told, content)


async def _ask(whom: Collection[K], ask: Callable[[K], Awaitable[T]]) -> tuple[dict[K, T], dict[K, EngineCallError]]:
    """Ask engines all at once, and wait for every one: what they answered, and why others did not."""
    answers: dict[K, T] = {}
    failures: dict[K, EngineCallError] = {}
    outcomes = await asyncio.gather(*map(ask, whom), return_exceptions=True)
    for engine, outcome in zip(whom, outcomes, strict=True):
        if isinstance(outcome, EngineCallError):
            failures[engine] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            answers[engine] = outcome
    return answers, failures


def _check_schema(schema: str | None) -> None:
    if schema is not None and not (schema.isdecimal() and int(schema) <= SCHEMA):
        raise ValueError(f"it is of schema {schema}, and this version understands up to {SCHEMA}")


def _absolute(path: Path) -> str:
    return str(path.absolute())  # the engine may run in another directory


def _endpoints(
    engines: Sequence[str] | Path | Callable[[], Sequence[str]], api_key: str | None, admin_key: str | None
) -> Callable[[], Iterable[Endpoint]]:
    if isinstance(engines, str):
        raise TypeError(f"engines must be a list of URLs, not the one string {engines!r}")
    if isinstance(engines, Path):
        return lambda: read_endpoints(engines).values()
    urls = engines if callable(engines) else lambda: engines
    return lambda: [Endpoint(url.rstrip("/"), 0, api_key, admin_key) for url in urls()]
