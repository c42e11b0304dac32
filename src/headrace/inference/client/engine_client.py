"""The orchestrator's client of the engines: typed calls, typed errors, retries.

Sampling and scoring do not change an engine, so a request without a result is retried on another engine: for
`retry_for` seconds after the first failure where no engine was reachable (502, 503 and 504 included) or all queues were
full (429), and once on every other engine after a timeout. A response is final: a request that one engine rejects or
fails would fare the same elsewhere. Updates of weights are idempotent. `pool.py` chooses the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.config.base import ConfigError
from headrace.inference.client.errors import (
    EngineBusy,
    EngineCallError,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    error_from_response,
)
from headrace.inference.client.http import HttpClient, ServerUnreachable
from headrace.inference.client.pool import MAX_RETRY_S, MIN_RETRY_S, NO_ENDPOINTS, EnginePool, PooledEngine, RetryState
from headrace.inference.keys import Keys, read_keys_file
from headrace.inference.schema import (
    SCHEMA_HEADER,
    SESSION_HEADER,
    Completion,
    GenerateRequest,
    Health,
    SamplingParams,
    Scores,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    read_completion,
    read_scores,
)
from headrace.observe import tracing
from headrace.rollout.schema import SCHEMA
from headrace.rollout.version import Version
from headrace.transport.endpoint import Endpoint, EndpointReader, is_past_server

T = TypeVar("T")
K = TypeVar("K")
Decode = Callable[[bytes], T]
"""Decodes a response body. Raises `msgspec.DecodeError` or ValueError for an invalid one."""

log = logging.getLogger(__name__)

_decode_health = msgspec.json.Decoder(Health).decode
_decode_acknowledgement = msgspec.json.Decoder(UpdateWeightsResponse).decode

HEALTH_ROUTE = "/health"
HEALTH_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 3.0
"""Seconds between two health checks of all engines, while requests are made."""
READY_POLL_S = 0.1
"""Seconds between two attempts to reach engines that start: a run samples nothing before."""
ENDPOINTS_MAX_AGE_S = 0.05
"""Seconds for which addresses are not read again, even after a failure."""


class EngineClient:
    """One or more engines behind one interface. Create and use it in one event loop.

    `engines` is a list of base URLs, the directory of a run's endpoints, or a function that returns the current URLs.
    The keys, or those in `keys_file`, are for URLs; an endpoint has its own. They may change at any time.
    """

    def __init__(
        self,
        engines: Sequence[str] | Path | Callable[[], Sequence[str]],
        *,
        timeout: float = 600.0,
        retry_for: float = 60.0,
        api_key: str | None = None,
        admin_key: str | None = None,
        keys_file: Path | None = None,
        past: bool = False,
    ) -> None:
        """`past`: of a run's endpoints, take that of its past policy instead of those that sample."""
        self._endpoints = _endpoint_source(engines, api_key, admin_key, keys_file, past)
        self._endpoints_read_at = -math.inf
        self._next_poll_at = -math.inf
        self._polling: asyncio.Task[object] | None = None
        self._timeout = timeout
        self._retry_for = retry_for
        self._pool = EnginePool()
        self._http = HttpClient()
        self._calls: defaultdict[PooledEngine, set[asyncio.Timeout]] = defaultdict(set)
        """By engine, what ends the calls in flight if the engine is lost with its host: no connection breaks then."""

    def join(self, session: str) -> None:
        """Add a conversation to a session, whose requests prefer the engine that has their prompt cached."""
        self._pool.join(session)

    def leave(self, session: str) -> None:
        self._pool.leave(session)

    async def generate(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        cache_salt: str | None = None,
        session: str | None = None,
        *,
        urgent: bool = False,
    ) -> Completion:
        """Sample one completion."""
        sampling = msgspec.structs.replace(sampling, logprobs=0)
        body = GenerateRequest(
            token_ids=token_ids, sampling_params=sampling, cache_salt=cache_salt, flat_logprobs=True, urgent=urgent
        )
        return await self._call_one("/inference/v1/generate", body, read_completion, session)

    async def score(self, token_ids: list[int], temperature: float = 1.0, *, urgent: bool = False) -> Scores:
        """Return the logprob of every token given those before it. `max_model_len` must allow one token more."""
        # An explicit seed, so that the engine's other requests sample the same as without this one.
        sampling = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0, seed=0)
        body = GenerateRequest(token_ids=token_ids, sampling_params=sampling, urgent=urgent)
        return await self._call_one("/inference/v1/generate", body, partial(read_scores, token_ids=token_ids))

    async def health(self) -> list[Health]:
        """Request the health of every engine once; raises if one does not respond."""
        return list(await asyncio.gather(*map(self._request_health, self._current_engines())))

    async def health_by_url(self) -> dict[str, Health]:
        """Request the health of every engine once and return that of those which respond, by URL."""
        return await self._poll(self._current_engines())

    async def wait_ready(self, deadline: float, at_least: int = 1, settle_s: float = math.inf) -> list[Health]:
        """Wait at most `deadline` seconds until every engine responds and there are at least this many.

        Once one responds, the others are waited for at most `settle_s` seconds.
        """
        began: float | None = None
        ready: dict[PooledEngine, Health] = {}

        async def attempt() -> list[Health]:
            nonlocal began
            engines = self._current_engines()
            waited_for = [engine for engine in engines if engine not in ready]
            replies, failures = await _gather(waited_for, self._request_health)
            ready.update(replies)
            if ready and began is None:
                began = time.monotonic()
            up = [ready[engine] for engine in engines if engine in ready]
            if not up or began is None or time.monotonic() - began < settle_s:
                if failures:
                    raise next(iter(failures.values()))
                if len(up) < at_least:
                    raise EngineUnavailable(f"{len(up)} of {at_least} inference servers are up")
            return up

        return await _retry(attempt, deadline, (EngineUnavailable, EngineTimeout), READY_POLL_S)

    async def pause(self) -> None:
        """Suspend all requests on every engine."""
        await self._call_all("/pause", None, _decode_health)

    async def resume(self) -> None:
        await self._call_all("/resume", None, _decode_health)

    async def update_weights(self, path: Path, version: Version, engines: Collection[str] | None = None) -> str:
        """Load a published version on every engine and return the checksum that all acknowledge.

        An engine that stays unreachable is left out if there are others. With `engines`, only those URLs are called,
        once.
        """
        absolute = str(path.absolute())  # noqa: ASYNC240 (the engine may run in another directory)
        body = UpdateWeightsRequest(absolute, version.incarnation, version.step)
        replies = await self._call_all("/update_weights", body, _decode_acknowledgement, engines)
        checksums = {reply.checksum for reply in replies}
        if len(checksums) != 1 or any(Version(reply.incarnation, reply.step) != version for reply in replies):
            raise EngineFailed(f"engines acknowledge different weights for version {version}: {replies}")
        return checksums.pop()

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        await self._http.close()

    async def _call_one(self, route: str, body: msgspec.Struct, decode: Decode[T], session: str | None = None) -> T:
        """Call the session's engine or the least loaded one, and other engines if that gives no result."""
        retries = RetryState(self._retry_for)
        self._poll_if_due()
        while True:
            engine = self._pool.choose(session, time.monotonic(), retries.avoided)
            if engine is None:
                await asyncio.sleep(retries.next_delay(self._pool.engines.values(), time.monotonic()))
                self._read_endpoints()
                self._poll_if_due()
                continue
            try:
                return await self._attempt(engine, route, body, decode, session)
            except (EngineUnavailable, EngineBusy, EngineTimeout) as error:
                retries.fail(engine, error, time.monotonic())
                self._read_endpoints()  # it may have restarted elsewhere
            except EngineRejected:
                self._read_endpoints(again=True)
                if self._pool.engines.get(engine.url) is engine:
                    raise
                # Otherwise the server has another key now.

    async def _attempt(
        self, engine: PooledEngine, route: str, body: msgspec.Struct, decode: Decode[T], session: str | None
    ) -> T:
        """Make one request and record its outcome. A timeout is not recorded: /health shows whether the engine runs."""
        engine.in_flight += 1
        try:
            with tracing.span("generate", engine=engine.url):
                result = await self._request(engine.url, route, body, decode, self._timeout, session=session)
        except (EngineUnavailable, EngineBusy, EngineFailed) as error:
            self._pool.record_error(engine, error, time.monotonic())
            raise
        finally:
            engine.in_flight -= 1
        self._pool.record_success(engine)
        return result

    async def _call_all(
        self, route: str, body: msgspec.Struct | None, decode: Decode[T], engines: Collection[str] | None = None
    ) -> list[T]:
        """Make an idempotent admin call on every engine until it responds, or once on `engines`.

        Engines with an open breaker are left out while there are others.
        """
        results: dict[str, T] = {}

        async def call(url: str) -> T:
            engine = self._pool.engines.get(url)
            try:
                return await self._request(url, route, body, decode, self._timeout, admin=True)
            except EngineUnavailable as error:
                if engine is not None:
                    self._pool.record_error(engine, error, time.monotonic())
                raise
            except EngineRejected:
                self._current_engines()
                if self._pool.engines.get(url) is engine:
                    raise
                return await call(url)  # with the key that it has now

        async def attempt() -> list[T]:
            urls = engines
            if urls is None:
                current = self._current_engines()
                usable = [engine.url for engine in current if engine.breaker.is_closed or engine.url in results]
                urls = usable or [engine.url for engine in current]
            new, failures = await _gather([url for url in urls if url not in results], call)
            results.update(new)
            if failures:  # preferably one that a retry cannot fix
                raise min(failures.values(), key=lambda failure: isinstance(failure, EngineUnavailable))
            return [results[url] for url in urls]

        async def keep_polling() -> None:  # so that calls to lost engines end
            while True:
                await asyncio.sleep(POLL_INTERVAL_S)
                self._poll_if_due()

        polling = asyncio.create_task(keep_polling())
        try:
            return await _retry(attempt, self._retry_for, (EngineUnavailable,) if engines is None else ())
        finally:
            polling.cancel()

    def _poll_if_due(self) -> None:
        """Start a background health check of the engines in use or due for a trial, if the last one is old."""
        now = time.monotonic()
        if now >= self._next_poll_at and (self._polling is None or self._polling.done()):
            self._read_endpoints()
            engines = self._pool.engines.values()
            polled = [engine for engine in engines if engine.breaker.is_closed or engine.breaker.is_due(now)]
            self._polling = asyncio.create_task(self._poll(polled))

    async def _poll(self, engines: Sequence[PooledEngine]) -> dict[str, Health]:
        """Request and record the health of these engines."""
        now = time.monotonic()
        self._next_poll_at = now + POLL_INTERVAL_S
        for engine in engines:
            engine.breaker.begin_trial(now)
        withdrawn = [engine for engine in self._calls if self._pool.engines.get(engine.url) is not engine]
        replies, failures = await _gather([*engines, *withdrawn], self._request_health)
        for engine, health in replies.items():
            self._pool.record_health(engine, health)
        for engine, error in failures.items():
            if isinstance(error, EngineUnavailable | EngineTimeout):
                self._pool.record_error(engine, error, time.monotonic())
                if self._pool.is_lost(engine):
                    for limit in self._calls.pop(engine, ()):
                        limit.reschedule(asyncio.get_running_loop().time())
        return {engine.url: replies[engine] for engine in engines if engine in replies}

    async def _request_health(self, engine: PooledEngine) -> Health:
        return await self._request(engine.url, HEALTH_ROUTE, None, _decode_health, HEALTH_TIMEOUT_S)

    def _current_engines(self) -> Sequence[PooledEngine]:
        """Return all engines by the addresses that are published now."""
        self._read_endpoints(again=True)
        if not self._pool.engines:
            raise EngineUnavailable(NO_ENDPOINTS)
        return list(self._pool.engines.values())

    def _read_endpoints(self, *, again: bool = False) -> None:
        """Update the pool from the published addresses, unless that was done a moment before."""
        now = time.monotonic()
        if again or now - self._endpoints_read_at > ENDPOINTS_MAX_AGE_S:
            self._endpoints_read_at = now
            self._pool.update(self._endpoints())

    async def _request(
        self,
        url: str,
        route: str,
        body: msgspec.Struct | None,
        decode: Decode[T],
        timeout: float,
        *,
        admin: bool = False,
        session: str | None = None,
    ) -> T:
        """Make one HTTP request and raise its failure as an `EngineCallError`. `admin`: with the admin key."""
        headers, until_lost = {}, asyncio.timeout(None)
        if (engine := self._pool.engines.get(url)) is not None:
            if route != HEALTH_ROUTE:
                self._calls[engine].add(until_lost)
            key = engine.endpoint.admin_key if admin else engine.endpoint.api_key
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if route != HEALTH_ROUTE:  # polls belong to no episode
            headers |= tracing.headers()
        if session is not None:  # hashed, since a session may have any name
            headers[SESSION_HEADER] = f"{zlib.crc32(session.encode()):08x}"
        method = "POST" if admin or body is not None else "GET"
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with until_lost:
                response = await self._http.request(method, url, route, data, timeout, headers)
        except TimeoutError as error:
            if until_lost.expired():
                raise EngineUnavailable(f"the engine at {url} no longer answers") from error
            raise EngineTimeout(f"{url}{route} gave no answer within {timeout:g} s") from error
        except ServerUnreachable as error:
            raise EngineUnavailable(f"the engine at {url} cannot be reached: {error}") from error
        finally:
            if engine is not None and (calls := self._calls.get(engine)) is not None:
                calls.discard(until_lost)
                if not calls:
                    del self._calls[engine]
        try:
            schema = response.headers.get(SCHEMA_HEADER.lower())
            if schema is not None and not (schema.isdecimal() and int(schema) <= SCHEMA):
                raise ValueError(f"its schema is {schema}, and this version supports up to {SCHEMA}")
            if response.status == 200:
                return decode(response.content)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineFailed(f"the response of {url}{route} is invalid: {error}") from error
        raise error_from_response(url, response.status, response.headers, response.content)


async def _retry(
    attempt: Callable[[], Awaitable[T]],
    seconds: float,
    retryable: tuple[type[EngineCallError], ...],
    max_delay: float = MAX_RETRY_S,
) -> T:
    """Repeat the attempt, with exponential backoff, while it fails with a retryable error and time is left."""
    deadline = time.monotonic() + seconds
    delay = MIN_RETRY_S
    while True:
        try:
            return await attempt()
        except retryable as error:
            if time.monotonic() + delay > deadline:
                raise type(error)(f"{error} (tried for {seconds:g} s)") from error
        await asyncio.sleep(delay)
        delay = min(2 * delay, max_delay)


async def _gather(
    engines: Collection[K], call: Callable[[K], Awaitable[T]]
) -> tuple[dict[K, T], dict[K, EngineCallError]]:
    """Call all engines concurrently and return results and failures."""
    results: dict[K, T] = {}
    failures: dict[K, EngineCallError] = {}
    outcomes = await asyncio.gather(*map(call, engines), return_exceptions=True)
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, EngineCallError):
            failures[engine] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results[engine] = outcome
    return results, failures


def _endpoint_source(
    engines: Sequence[str] | Path | Callable[[], Sequence[str]],
    api_key: str | None,
    admin_key: str | None,
    keys_file: Path | None,
    past: bool,
) -> Callable[[], Iterable[Endpoint]]:
    """Return a function that reads the current endpoints, for the arguments of `EngineClient`."""
    if isinstance(engines, str):
        raise TypeError(f"engines must be a list of URLs, not the string {engines!r}")
    if isinstance(engines, Path):
        reader = EndpointReader(engines)
        return lambda: [endpoint for name, endpoint in reader.read().items() if is_past_server(name) == past]
    urls = engines if callable(engines) else lambda: engines

    fixed = Keys((api_key,) if api_key else (), (admin_key,) if admin_key else ())
    keys = fixed if keys_file is None else read_keys_file(keys_file)

    def read() -> list[Endpoint]:
        nonlocal keys
        if keys_file is not None:
            try:
                keys = read_keys_file(keys_file)
            except ConfigError as error:  # it may be about to be written
                log.warning("the keys stay as they were: %s", error)
        api, admin = (next(iter(each), None) for each in (keys.api, keys.admin))
        return [Endpoint(url.rstrip("/"), 0, api, admin) for url in urls()]

    return read
