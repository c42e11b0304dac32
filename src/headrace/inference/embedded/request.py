"""One request in the engine, from its submission to its result."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import Future

import msgspec

from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version


class EngineError(Exception):
    """The engine could not finish a request."""


class InvalidRequest(ValueError):
    """A request that can never be served. The message names the field at fault."""


class RequestCancelled(EngineError):
    """Whoever asked no longer wants the answer."""


class EngineStopped(EngineError):
    """The engine is shutting down."""


class Result(msgspec.Struct):
    """What a request produced. Per-token lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[Version, int, int]]
    """(version, start, end): these weights sampled the tokens [start, end)."""
    finish_reason: str
    """`stop` (end-of-sequence or a stop token, which is the last token) or `length`."""
    stop_reason: int | None
    """The stop token, if the request named it."""
    prompt_logprobs: list[float] | None
    """One per prompt token, the first 0.0: nothing predicts it."""
    truncated_logprobs: list[float] | None = None
    """Among what top_p and top_k left to choose from; None unless they take anything away."""


class Request:
    """A sequence that is waiting, running or done. Only the engine changes it."""

    def __init__(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        max_new: int,
        eos_token_ids: Iterable[int],
        shared_random: random.Random,
        cache_salt: str | None,
    ) -> None:
        self.tokens = list(token_ids)
        self.prompt_length = len(token_ids)
        self.params = params
        self.max_new = max_new
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self.random = shared_random if params.seed is None else random.Random(params.seed)
        self.prompt_hash = hash((cache_salt, *token_ids))
        """Requests of one prompt, and one salt, find each other by it."""
        self.logprobs: list[float] = []
        self.truncated_logprobs: list[float] | None = [] if params.truncates else None
        self.prompt_logprobs: list[float] | None = None if params.prompt_logprobs is None else [0.0]
        self.row = -1
        """Its row of the KV cache while it runs, -1 while it waits."""
        self.cached_with: Version | None = None
        """The weights behind its keys and values, if one version made them all."""
        self.future: Future[Result] = Future()
        self.future.set_running_or_notify_cancel()  # a future's own cancel() would free no row
        self._spans: list[tuple[Version, int]] = []

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def repeats_prompt_of(self, other: Request) -> bool:
        """Whether the keys and values of this prompt are also the beginning of the other's."""
        return self.tokens == other.tokens[: other.prompt_length]

    def sampled_by(self, version: Version) -> None:
        """From here on, tokens come from these weights."""
        start = len(self.logprobs)
        if self._spans and self._spans[-1][1] == start:
            self._spans.pop()
        self._spans.append((version, start))

    def add(self, token: int, logprob: float, log_mass: float = 0.0) -> bool:
        """Append a sampled token; True if it was the last. `log_mass` is that of what it was chosen from."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.truncated_logprobs is not None:
            self.truncated_logprobs.append(logprob - log_mass)
        return token in self.stop_ids or len(self.logprobs) >= self.max_new

    def finish(self) -> None:
        sampled = self.tokens[self.prompt_length :]
        last = sampled[-1]
        ends = [start for _, start in self._spans[1:]] + [len(sampled)]
        self.future.set_result(
            Result(
                sampled,
                self.logprobs,
                [(version, start, end) for (version, start), end in zip(self._spans, ends, strict=True)],
                "stop" if last in self.stop_ids else "length",
                last if last in self.params.stop_token_ids else None,
                self.prompt_logprobs,
                self.truncated_logprobs,
            )
        )

    def fail(self, error: EngineError) -> None:
        self.future.set_exception(error)
