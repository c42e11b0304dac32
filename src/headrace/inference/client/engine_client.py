"""The orchestrator's line to the engines: typed calls, typed errors, the least busy engine first.

An engine that cannot be reached is asked again for a bounded time: a request that got no answer had no effect, and the
launcher restarts engines that died. Where the address comes from a file, it is read again each time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from headrace.errors import Failure
from headrace.inference.client.http import HttpClient, Unreachable
from headrace.inference.schema import (
    SCHEMA_HEADER,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Health,
    SamplingParams,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightVersionSpan,
)
from headrace.rollout.batch import SCHEMA
from headrace.rollout.version import Version
from headrace.transport.endpoint import read_endpoints

T = TypeVar("T")

FIRST_RETRY = 0.05
LONGEST_RETRY = 2.0
HEALTH_TIMEOUT = 5.0


class EngineCallError(Failure):
    """A call to an engine that gave no result. Subclasses say what to do about it."""


class EngineUnavailable(EngineCallError):
    """No engine could be reached within the time allowed for trying."""


class EngineRejected(EngineCallError):
    """The engine will never serve this request; the message is its own."""


class EngineTimeout(EngineCallError):
    """The engine took longer than the caller allows."""


class EngineFailed(EngineCallError):
    """The engine accepted the request and failed at it, or answered what it must not."""


class Completion(msgspec.Struct):
    """What the policy sampled; the lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightVersionSpan]
    """Which version sampled which tokens; `versions` has one entry per token."""
    finish_reason: str
    truncated_logprobs: list[float] | None = None
    """Among what top_p and top_k left to choose from; None where they left everything, or the engine does not say."""

    @property
    def versions(self) -> list[Version]:
        return expand_versions(self.spans)

    @property
    def steps(self) -> np.ndarray:
        """The step of each token's version."""
        steps = [Version.parse(span.version).step for span in self.spans]
        return np.repeat(np.array(steps, np.int32), [span.end - span.start for span in self.spans])


class Scores(msgspec.Struct):
    """How likely an engine finds a sequence."""

    logprobs: list[float]
    """One per token; the first, which nothing predicts, is 0.0."""
    version: Version | None
    """The weights that say so; None from an engine that serves no policy."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    truncated_logprobs: list[float] | None = None


class _Generated(msgspec.Struct):
    """Of a `GenerateResponse`, what a completion needs: most of the whole is text that says the token ids again."""

    choices: list[_Choice]


class _Session(msgspec.Struct):
    """Conversations that share a prompt, and the engine that has it."""

    members: int = 0
    engine: str = ""


class EngineClient:
    """One or more engines behind one interface. Make and use it inside one event loop.

    `engines` is a list of base URLs, the directory of a run's endpoints, or a function that gives the URLs that hold.
    """

    def __init__(
        self,
        engines: Sequence[str] | Path | Callable[[], Sequence[str]],
        *,
        timeout: float = 600.0,
        retry_for: float = 60.0,
    ) -> None:
        self._addresses = _addresses(engines)
        self._known: Sequence[str] = ()
        self._timeout = timeout
        self._retry_for = retry_for
        self._in_flight: Counter[str] = Counter()
        self._sessions: dict[str, _Session] = {}
        self._resting: dict[str, float] = {}
        """Until when an engine that could not be reached comes last."""
        self._http = HttpClient()

    def join(self, session: str) -> None:
        """One more conversation of a session begins: all of a session prefer the engine that caches their prompt."""
        self._sessions.setdefault(session, _Session()).members += 1

    def leave(self, session: str) -> None:
        self._sessions[session].members -= 1
        if not self._sessions[session].members:
            del self._sessions[session]

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
        response = await self._call_one("/inference/v1/generate", body, _Generated, session)
        choice = response.choices[0]
        if choice.logprobs is None or choice.weight_versions is None:
            raise EngineFailed("the engine's answer has no logprobs or no weight_versions: it cannot serve a policy")
        completion = Completion(
            choice.token_ids,
            [entry.logprob for entry in choice.logprobs.content],
            choice.weight_versions,
            choice.finish_reason,
            choice.truncated_logprobs,
        )
        covered = sum(span.end - span.start for span in completion.spans)
        if not len(completion.token_ids) == len(completion.logprobs) == covered:
            raise EngineFailed("the engine's answer has token_ids, logprobs and weight_versions of different lengths")
        return completion

    async def score(self, token_ids: list[int], temperature: float = 1.0, *, urgent: bool = False) -> Scores:
        """The logprob of every token after those before it, computed anew. An engine needs room for one token more."""
        # A seed of its own: the engine's other requests sample as if this one had not been.
        sampling = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0, seed=0)
        body = GenerateRequest(token_ids=token_ids, sampling_params=sampling, urgent=urgent)
        response = await self._call_one("/inference/v1/generate", body, GenerateResponse)
        entries = response.prompt_logprobs or []
        scores = [
            0.0 if entry is None else entry[token].logprob for entry, token in zip(entries, token_ids, strict=False)
        ]
        if len(scores) != len(token_ids):
            raise EngineFailed(f"the engine scored {len(scores)} of {len(token_ids)} tokens")
        spans = response.choices[0].weight_versions  # prompt and first token come out of one step of the engine
        return Scores(scores, Version.parse(spans[0].version) if spans else None)

    async def health(self) -> list[Health]:
        """How each engine is, asked once: an engine that does not answer raises."""
        urls = self._urls(refresh=True)
        return list(
            await asyncio.gather(*[self._request(url, "/health", None, Health, HEALTH_TIMEOUT) for url in urls])
        )

    async def answering(self) -> dict[str, Health]:
        """How those engines are that answer, by address; asked once."""
        urls = self._urls(refresh=True)
        answers, _ = await _ask(urls, lambda url: self._request(url, "/health", None, Health, HEALTH_TIMEOUT))
        return answers

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
        await self._call_all("/pause", None, Health)

    async def resume(self) -> None:
        await self._call_all("/resume", None, Health)

    async def update_weights(self, path: Path, version: Version, engines: Collection[str] | None = None) -> str:
        """Move every engine to a published version; returns the checksum that they all acknowledge.

        With `engines` only those, which are asked once.
        """
        body = UpdateWeightsRequest(_absolute(path), version.incarnation, version.step)
        answers = await self._call_all("/update_weights", body, UpdateWeightsResponse, engines)
        checksums = {answer.checksum for answer in answers}
        if len(checksums) != 1 or any(Version(a.incarnation, a.step) != version for a in answers):
            raise EngineFailed(f"engines acknowledge different weights for version {version}: {answers}")
        return checksums.pop()

    async def close(self) -> None:
        await self._http.close()

    async def _call_one(self, route: str, body: msgspec.Struct, kind: type[T], session: str | None = None) -> T:
        """Ask the session's engine, or the one with the least to do."""

        async def attempt() -> T:
            url = self._choose(session)
            self._in_flight[url] += 1
            try:
                return await self._request(url, route, body, kind, self._timeout)
            except EngineUnavailable:
                self._resting[url] = time.monotonic() + LONGEST_RETRY
                self._known = ()  # it may come back elsewhere
                raise
            finally:
                self._in_flight[url] -= 1

        return await self._persist(attempt, self._retry_for, (EngineUnavailable,))

    async def _call_all(
        self, route: str, body: msgspec.Struct | None, kind: type[T], engines: Collection[str] | None = None
    ) -> list[T]:
        """Ask every engine until it has answered, or some engines once. Each such call may be repeated without harm."""
        answers: dict[str, T] = {}

        async def attempt() -> list[T]:
            urls = self._urls(refresh=True) if engines is None else engines
            left = [url for url in urls if url not in answers]
            new, failures = await _ask(
                left, lambda url: self._request(url, route, body, kind, self._timeout, post=True)
            )
            answers.update(new)
            if failures:  # first of all one that another try would not mend
                raise min(failures, key=lambda failure: isinstance(failure, EngineUnavailable))
            return [answers[url] for url in urls]

        return await self._persist(attempt, self._retry_for, (EngineUnavailable,) if engines is None else ())

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

    async def _request(
        self,
        url: str,
        route: str,
        body: msgspec.Struct | None,
        kind: type[T],
        timeout: float,
        *,
        post: bool = False,
    ) -> T:
        """One HTTP exchange, its failures told apart."""
        method = "POST" if post or body is not None else "GET"
        data = None if body is None else msgspec.json.encode(body)
        try:
            status, headers, content = await self._http.request(method, url, route, data, timeout)
        except TimeoutError as error:
            raise EngineTimeout(f"{url}{route} gave no answer within {timeout:g} s") from error
        except Unreachable as error:
            raise EngineUnavailable(f"the engine at {url} cannot be reached: {error}") from error
        schema = headers.get(SCHEMA_HEADER.lower())
        if schema is not None and int(schema) > SCHEMA:
            raise EngineFailed(f"the engine at {url} speaks schema {schema}; this version understands up to {SCHEMA}")
        if status != 200:
            raise _failure(url, status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{url}{route} answered what no engine of ours does: {error}") from error

    def _choose(self, session: str | None) -> str:
        known = self._sessions.get(session) if session is not None else None
        if known is not None and known.engine in self._urls() and not self._is_resting(known.engine):
            return known.engine
        url = self._least_busy()
        if known is not None:
            known.engine = url
        return url

    def _least_busy(self) -> str:
        """By conversations where there are sessions: those that wait between two requests will be back."""
        if len(urls := self._urls()) == 1:
            return urls[0]
        load = Counter(self._in_flight)
        for session in self._sessions.values():
            load[session.engine] += session.members
        return min(urls, key=lambda url: (self._is_resting(url), load[url]))

    def _is_resting(self, url: str) -> bool:
        return self._resting.get(url, 0.0) > time.monotonic()

    def _urls(self, *, refresh: bool = False) -> Sequence[str]:
        if refresh or not self._known:
            self._known = [url.rstrip("/") for url in self._addresses()]
        if not self._known:
            raise EngineUnavailable("no engine has said where it listens yet")
        return self._known


async def _ask(urls: Collection[str], ask: Callable[[str], Awaitable[T]]) -> tuple[dict[str, T], list[EngineCallError]]:
    """Ask engines all at once, and wait for every one: the answers by address, and why others gave none."""
    answers: dict[str, T] = {}
    failures: list[EngineCallError] = []
    outcomes = await asyncio.gather(*map(ask, urls), return_exceptions=True)
    for url, outcome in zip(urls, outcomes, strict=True):
        if isinstance(outcome, EngineCallError):
            failures.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            answers[url] = outcome
    return answers, failures


def expand_versions(spans: Sequence[WeightVersionSpan]) -> list[Version]:
    """One version per token."""
    return [version for span in spans for version in [Version.parse(span.version)] * (span.end - span.start)]


def _absolute(path: Path) -> str:
    return str(path.absolute())  # the engine may run in another directory


def _addresses(engines: Sequence[str] | Path | Callable[[], Sequence[str]]) -> Callable[[], Sequence[str]]:
    if isinstance(engines, Path):
        return lambda: [endpoint.url for endpoint in read_endpoints(engines).values()]
    if callable(engines):
        return engines
    if isinstance(engines, str):
        raise TypeError(f"engines must be a list of URLs, not the one string {engines!r}")
    return lambda: engines


def _failure(url: str, status: int, content: bytes) -> EngineCallError:
    """The error that a reply other than 200 stands for."""
    try:
        message = msgspec.json.decode(content, type=ErrorResponse).error.message
    except msgspec.DecodeError:  # not one of ours: a proxy, or another server altogether
        message = content[:200].decode(errors="replace")
    if status == 503:
        return EngineUnavailable(f"the engine at {url} is not available: {message}")
    return (EngineRejected if 400 <= status < 500 else EngineFailed)(f"{message} (HTTP {status} from {url})")
