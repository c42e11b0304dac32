"""One request in the engine, from its submission to its result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from headrace.inference.backend import EngineError, GenerationResult, TokenChunk, TopLogprobs
from headrace.inference.embedded.blocks import BLOCK, next_name, root_name
from headrace.inference.embedded.stop_strings import StopStrings
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version

if TYPE_CHECKING:
    from headrace.inference.embedded.adapters import LoadedAdapter

SEEDS = 1 << 64
"""Seeds that differ by a multiple of this are one: Python's generator would take -1 for 1."""


class Weights(NamedTuple):
    """What an engine samples from. Two that were installed one after the other are never equal."""

    version: Version
    installed: int
    """Which installation it was: a version may come back with other tensors."""


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
        stop_strings: StopStrings | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.tokens = list(token_ids)
        self.prompt_length = len(token_ids)
        self.params = params
        self.max_new = max_new
        self.adapter = adapter
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self._random = shared_random if params.seed is None else random.Random(params.seed % SEEDS)
        self._uniform: float | None = None
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] | None = [] if params.logprobs else None
        self.truncated_logprobs: list[float] | None = [] if params.truncates else None
        self.prompt_logprobs: list[float] | None = None
        self.prompt_top_logprobs: list[TopLogprobs] | None = None
        self.blocks: list[int] = []
        """Where its keys and values are, in order."""
        self.computed = 0
        """Tokens whose keys and values are there."""
        self.is_proven = False
        """Whether a token came of all that is computed: then its keys and values are there, and are numbers."""
        self.losses = 0
        """How often it has lost its blocks."""
        self.cached_tokens = 0
        self.future: Future[GenerationResult] = Future()
        self.future.set_running_or_notify_cancel()  # a future's own cancel() would free no block
        self.on_tokens: Callable[[], None] | None = None
        """Called on the engine's thread after a step that sampled for this request."""
        self._cache_salt = cache_salt
        self._stop_strings = stop_strings
        self._begun_with: Weights | None = None
        self._stopped_by: str | None = None
        self._names: list[bytes] = []
        self._spans: list[tuple[Version, int]] = []
        self.score_anew()

    @property
    def has_sampled(self) -> bool:
        return bool(self.logprobs)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    @property
    def has_bad_scores(self) -> bool:
        """Whether any logprob of the prompt is not a number."""
        return not self.has_sampled and any(score != score for score in self.prompt_logprobs or ())

    def score_anew(self) -> None:
        """Begin with the prompt's logprobs from its start, where they are asked for."""
        count = self.params.prompt_logprobs
        self.prompt_logprobs = None if count is None else [0.0]
        self.prompt_top_logprobs = [[]] if count else None

    def begin(self, weights: Weights) -> None:
        """From here on tokens, and the keys and values of all of them, come from these weights."""
        if weights == self._begun_with:
            return
        self._begun_with = weights
        self.sampled_by(weights.version)
        self._names = [root_name(weights.installed, self.adapter and self.adapter.identity, self._cache_salt)]

    def advance_to(self, end: int) -> None:
        """The tokens before `end` are computed, once the step that is planned has gone well."""
        self.computed = end
        self.is_proven = False

    def lose_blocks(self) -> list[int]:
        """Nothing of it is computed any more; returns the blocks it had."""
        blocks, self.blocks = self.blocks, []
        self.computed = 0
        self.is_proven = False
        self.losses += 1
        if not self.has_sampled:
            self.score_anew()
        return blocks

    def block_name(self, index: int) -> bytes:
        """What the block with these of its tokens is called."""
        while len(self._names) <= index + 1:
            start = (len(self._names) - 1) * BLOCK
            self._names.append(next_name(self._names[-1], self.tokens[start : start + BLOCK]))
        return self._names[index + 1]

    def whole_name(self) -> tuple[bytes, bool]:
        """What all its tokens are called together. With a seed they are computed in another way."""
        full = len(self.tokens) // BLOCK
        before = self.block_name(full - 1) if full else self._names[0]
        return next_name(before, self.tokens[full * BLOCK :]), self.params.seed is not None

    def sampled_by(self, version: Version) -> None:
        """From here on, tokens come from these weights."""
        start = len(self.logprobs)
        if self._spans and self._spans[-1][1] == start:
            self._spans.pop()
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, start))

    def uniform(self) -> float:
        """The number that chooses its next token: the same until that is added, should a step have to be repeated."""
        if self._uniform is None:
            self._uniform = self._random.random()
        return self._uniform

    def add(self, token: int, logprob: float, log_mass: float = 0.0, top: TopLogprobs | None = None) -> bool:
        """Append a sampled token; True if it was the last. `log_mass` is that of what it was chosen from."""
        self._uniform = None
        self.is_proven = True
        self.tokens.append(token)
        if self.truncated_logprobs is not None:
            self.truncated_logprobs.append(logprob - log_mass)
        if self.top_logprobs is not None:
            self.top_logprobs.append(top or [])
        self.logprobs.append(logprob)  # last: another thread counts tokens by these
        if self.params.stop:
            assert self._stop_strings is not None
            self._stopped_by = self._stop_strings.completed(self.params.stop, self.tokens, self.prompt_length)
        return self._stopped_by is not None or token in self.stop_ids or len(self.logprobs) >= self.max_new

    def piece(self, start: int) -> TokenChunk:
        """What was sampled from the `start`th token on."""
        end = len(self.logprobs)
        return TokenChunk(
            self.tokens[self.prompt_length + start : self.prompt_length + end],
            self.logprobs[start:end],
            None if self.top_logprobs is None else self.top_logprobs[start:end],
        )

    @property
    def finish_reason(self) -> str:
        return "stop" if self._stopped_by is not None or self.tokens[-1] in self.stop_ids else "length"

    def finish(self) -> None:
        sampled = self.tokens[self.prompt_length :]
        last = sampled[-1]
        ends = [start for _, start in self._spans[1:]] + [len(sampled)]
        named = last if last in self.params.stop_token_ids else None
        self.future.set_result(
            GenerationResult(
                sampled,
                self.logprobs,
                [(version, start, end) for (version, start), end in zip(self._spans, ends, strict=True)],
                finish_reason=self.finish_reason,
                stop_reason=self._stopped_by if self._stopped_by is not None else named,
                prompt_logprobs=self.prompt_logprobs,
                truncated_logprobs=self.truncated_logprobs,
                top_logprobs=self.top_logprobs,
                prompt_top_logprobs=self.prompt_top_logprobs,
                cached_tokens=self.cached_tokens,
            )
        )

    def fail(self, error: EngineError) -> None:
        self.future.set_exception(error)
