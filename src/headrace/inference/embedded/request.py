"""One request in the engine, from its submission to its result, and stop strings in its sampled tokens.

A stop string is complete once its last character is sampled, so text is decoded only if the last token's own text
contains that character, or part of one. Special tokens are not part of a reply's text: a stop string may span one, and
is not found in the name of one. Only a stop string that contains the whole name of a special token is searched for in
the text with special tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.inference.backend import EngineError, GenerationResult, TokenChunk, TopLogprobs
from headrace.inference.embedded.block_manager import BLOCK_SIZE, block_hash, block_hashes
from headrace.inference.embedded.grammar import Matcher
from headrace.inference.embedded.logits_processing import TokenCounts
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version

if TYPE_CHECKING:
    from headrace.inference.embedded.adapters import LoadedAdapter

Decode = Callable[[list[int]], str]

PENDING = -1
"""A token that is being sampled, whose id is not known yet."""
SEED_MODULUS = 1 << 64
"""Seeds are taken modulo this: Python's generator would treat -1 as 1."""
REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not a whole character."""
DROPPED_SPACE = " "
"""A character that some decoders drop at the beginning of a text."""


class StopStrings:
    """Finds stop strings in the tokens of an engine's requests; `decode` includes special tokens in its text."""

    def __init__(self, decode: Decode, special_tokens: Collection[int] = ()) -> None:
        self._decode = decode
        self._special = frozenset(special_tokens)
        self._special_names = [text for token in self._special if (text := decode([token]))]
        self._texts: dict[int, str] = {}

    def find_completed(self, stops: Sequence[str], tokens: list[int], start: int) -> str | None:
        """Return the stop string that the last token completes, in the tokens from `start` on."""
        text = self._texts.get(tokens[-1])
        if text is None:
            text = self._texts[tokens[-1]] = self._decode([tokens[-1]])
        if REPLACEMENT not in text and not any(stop[-1] == DROPPED_SPACE or stop[-1] in text for stop in stops):
            return None
        longest = 4 * max(map(len, stops)) + 4  # a character takes at most four tokens
        with_special = [stop for stop in stops if any(name in stop for name in self._special_names)]
        plain = [stop for stop in stops if stop not in with_special]
        last = recent = tokens[max(start, len(tokens) - longest) :]
        if not self._special.isdisjoint(recent):  # then as many tokens that are not special
            backwards = (tokens[index] for index in range(len(tokens) - 1, start - 1, -1))
            last = list(islice((token for token in backwards if token not in self._special), len(recent)))[::-1]
        return self._find_first(plain, last) or self._find_first(with_special, recent)

    def _find_first(self, stops: Sequence[str], tokens: list[int]) -> str | None:
        """Return the stop string that occurs first in the text of these tokens."""
        text = self._decode(tokens) if stops else ""
        matches = [stop for stop in stops if stop in text]
        return min(matches, key=text.index) if matches else None


class Weights(NamedTuple):
    """Identity of an engine's weights; differs between any two installations."""

    version: Version
    installed: int
    """Number of the installation: a version may be published again with other tensors."""


class Latent(NamedTuple):
    """What a sampled token is blended with if it is a thought."""

    values: np.ndarray
    """[hidden size], float16."""
    logprob: float | None
    """The logprob of the latent itself, in the place of its token's; None if tokens are sampled."""


class Request:
    """A sequence that is waiting, running or finished; only the engine changes it."""

    # Every step reads all running requests: with dictionaries, which Python does not share between instances with so
    # many attributes, its host time is a fifth longer.
    __slots__ = (
        "_hashes",
        "_is_complete",
        "_is_recorded",
        "_is_watched",
        "_no_latent",
        "_noise",
        "_random",
        "_spans",
        "_stop_strings",
        "_stopped_by",
        "_uniforms",
        "_weights",
        "adapter",
        "blocks",
        "cache_salt",
        "cached_tokens",
        "computed",
        "counts",
        "future",
        "is_done",
        "is_plain",
        "is_thinking",
        "is_verified",
        "latents",
        "logprobs",
        "matcher",
        "max_length",
        "on_tokens",
        "params",
        "processes_logits",
        "prompt_length",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "resets",
        "routes",
        "stop_ids",
        "tokens",
        "top_logprobs",
        "truncated_logprobs",
    )

    def __init__(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        eos_token_ids: Iterable[int],
        shared_random: random.Random,
        cache_salt: str | None,
        stop_strings: StopStrings | None = None,
        adapter: LoadedAdapter | None = None,
        hidden_size: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        self.tokens = list(token_ids)
        self.prompt_length = len(token_ids)
        self.params = params
        self.max_length = len(token_ids) + max_new_tokens
        self.adapter = adapter
        self.matcher = matcher
        """The state in the grammar that its tokens match."""
        self._is_complete = False
        """Whether nothing can follow in that grammar."""
        self.counts = TokenCounts(token_ids, max_new_tokens) if params.penalizes else None
        self.processes_logits = params.logprobs_mode is not None
        self.is_plain = adapter is None and not (
            params.penalizes
            or params.truncates
            or params.logprobs
            or params.prompt_logprobs is not None
            or params.latents
        )
        """Whether its tokens can be sampled without reading logits outside of the step; it may have a grammar."""
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self._random = shared_random if params.seed is None else random.Random(params.seed % SEED_MODULUS)
        self._uniforms: deque[float] = deque()
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] | None = [] if params.logprobs else None
        self.truncated_logprobs: list[float] | None = [] if params.truncates else None
        self.latents: list[np.ndarray] | None = None if params.latents is None else []
        """Of each sampled token, float16; zeros after the thoughts."""
        self.is_thinking = params.latents is not None
        """Whether the next token gets a latent, unless it completes the text that ends the thoughts."""
        self.routes: list[np.ndarray] = []
        """Routes of its first tokens that a new version of the weights would have overwritten."""
        self._no_latent = np.zeros(hidden_size, np.float16)
        self._noise: np.ndarray | None = None
        self._is_recorded = self.latents is not None or params.truncates or bool(params.logprobs)
        """Whether more than the logprob of each token is kept."""
        self._is_watched = bool(params.stop) or self.counts is not None or matcher is not None
        """Whether the text or the grammar of its tokens matters while it is sampled."""
        self.prompt_logprobs: list[float] | None = None
        self.prompt_top_logprobs: list[TopLogprobs] | None = None
        self.blocks: list[int] = []
        """Blocks of its keys and values, in order."""
        self.computed = 0
        """Tokens whose keys and values are in the blocks."""
        self.is_verified = False
        """Whether a token was sampled from all computed tokens, so that their keys and values are finite."""
        self.resets = 0
        """How often its blocks were freed."""
        self.cached_tokens = 0
        self.is_done = False
        """Whether its `future` has a result or an error."""
        self.future: Future[GenerationResult] = Future()
        self.future.set_running_or_notify_cancel()  # Future.cancel() would not free its blocks
        self.on_tokens: Callable[[], None] | None = None
        """Called on the engine's thread after a step that sampled for this request."""
        self.cache_salt = cache_salt
        self._stop_strings = stop_strings
        self._weights: Weights | None = None
        self._stopped_by: str | None = None
        self._hashes: list[bytes] = []
        """Of what its blocks have in common with those that they may be shared with, then of its blocks."""
        self._spans: list[tuple[Version, int]] = []
        self.reset_prompt_logprobs()

    @property
    def has_sampled(self) -> bool:
        return bool(self.logprobs)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def reset_prompt_logprobs(self) -> None:
        count = self.params.prompt_logprobs
        self.prompt_logprobs = None if count is None else [0.0]
        self.prompt_top_logprobs = [[]] if count else None

    def use_weights(self, weights: Weights) -> None:
        """Compute all tokens from here on with these weights."""
        if weights == self._weights:
            return
        self._weights = weights
        self.start_span(weights.version)
        shared_by = (weights.installed, self.adapter and self.adapter.identity, self.cache_salt)
        self._hashes = [block_hash(repr(shared_by).encode(), ())]

    def mark_computed(self, end: int) -> None:
        """Count the tokens before `end` as computed, by the step that is being planned."""
        self.computed = end
        self.is_verified = False

    def reset_computed(self) -> list[int]:
        """Count no token as computed, and return the blocks that the request had."""
        blocks, self.blocks = self.blocks, []
        self.computed = 0
        self.is_verified = False
        self.resets += 1
        if not self.has_sampled:
            self.reset_prompt_logprobs()
        return blocks

    def block_hashes(self, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks, which are full."""
        hashes, end = self._hashes, count * BLOCK_SIZE
        start = (len(hashes) - 1) * BLOCK_SIZE
        if self.latents is None and start < end:
            hashes += block_hashes(hashes[-1], self.tokens[start:end])
        for first in range((len(hashes) - 1) * BLOCK_SIZE, end, BLOCK_SIZE):
            hashes.append(self._hash_tokens(hashes[-1], first, first + BLOCK_SIZE))
        return hashes[1 : count + 1]

    def prompt_hash(self) -> tuple[bytes, bool]:
        """Return the hash of all tokens, and whether there is a seed: then the prompt is computed in fixed chunks."""
        full = len(self.tokens) // BLOCK_SIZE
        previous = self.block_hashes(full)[-1] if full else self._hashes[0]
        return self._hash_tokens(previous, full * BLOCK_SIZE, len(self.tokens)), self.params.seed is not None

    def _hash_tokens(self, previous: bytes, start: int, end: int) -> bytes:
        """Return the hash of these tokens after the block whose hash is `previous`."""
        return block_hash(previous, self.tokens[start:end], self._latent_bytes(start, end))

    def _latent_bytes(self, start: int, end: int) -> bytes:
        """Return what identifies the latents of the tokens [start, end); empty if they are plain."""
        rows = self.latents_of(start, end)
        if not any(row.any() for row in rows):
            return b""
        return b"".join(row.tobytes() for row in rows)

    def latents_of(self, start: int, end: int) -> list[np.ndarray]:
        """Return the latents of the sampled tokens among [start, end)."""
        first, last = max(0, start - self.prompt_length), max(0, end - self.prompt_length)
        return [] if self.latents is None else self.latents[first:last]

    def start_span(self, version: Version) -> None:
        """Attribute the tokens sampled from here on to this version."""
        start = len(self.logprobs)
        if self._spans and self._spans[-1][1] == start:
            self._spans.pop()
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, start))

    def uniform(self, ahead: int = 0) -> float:
        """Return the number in [0, 1) that chooses the next token, or the one `ahead` tokens after it.

        Each stays the same until its token is appended.
        """
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._random.random())
        return self._uniforms[ahead]

    def noise(self) -> np.ndarray:
        """Return the standard normal numbers of the next latent; unchanged until a token is appended."""
        if self._noise is None:
            generator = np.random.default_rng(self._random.getrandbits(64))
            self._noise = generator.standard_normal(len(self._no_latent), np.float32)
        return self._noise

    def append_pending(self) -> None:
        """Append a placeholder for the token that is being sampled, which `append` replaces."""
        if self._uniforms:
            self._uniforms.popleft()
        self.tokens.append(PENDING)

    def append(
        self,
        token: int,
        logprob: float,
        log_mass: float = 0.0,
        top: TopLogprobs | None = None,
        latent: Latent | None = None,
    ) -> bool:
        """Append a sampled token, and return whether it is the last one.

        `log_mass` is the log of the probability left by truncation. `latent` is used if the token is a thought. The
        matcher has accepted the token, unless it is a stop token.
        """
        tokens, place = self.tokens, self.prompt_length + len(self.logprobs)
        if place < len(tokens):
            tokens[place] = token  # was pending; the next one may be pending, too
        else:
            self.append_pending()
            tokens[place] = token
        if self.computed < place:
            self.computed = place  # by a draft, before it was known to be right
        self.is_verified = True
        if self._is_recorded:
            if self.latents is not None:
                logprob = self._append_latent(latent, tokens[: place + 1], logprob)
            if self.truncated_logprobs is not None:
                self.truncated_logprobs.append(logprob - log_mass)
            if self.top_logprobs is not None:
                self.top_logprobs.append(top or [])
        self.logprobs.append(logprob)  # last: other threads read its length
        if self._is_watched:
            self._watch(token, place + 1)
        is_stopped = self._stopped_by is not None or self._is_complete or token in self.stop_ids
        if not is_stopped and place + 1 < self.max_length:
            return False
        del tokens[place + 1 :]
        return True

    def _watch(self, token: int, end: int) -> None:
        """Note whether a token, the last of those before `end`, completes a stop string or the grammar; count it."""
        if self.params.stop:
            assert self._stop_strings is not None
            tokens = self.tokens if end == len(self.tokens) else self.tokens[:end]
            self._stopped_by = self._stop_strings.find_completed(self.params.stop, tokens, self.prompt_length)
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None and self._stopped_by is None and token not in self.stop_ids:
            self._is_complete = self.matcher.is_complete()

    def _append_latent(self, latent: Latent | None, tokens: list[int], logprob: float) -> float:
        """Append the latent of the last of these tokens, and return its logprob."""
        assert self.latents is not None
        if self.is_thinking:
            assert self.params.latents is not None and self._stop_strings is not None
            ends = [self.params.latents.until]
            self.is_thinking = self._stop_strings.find_completed(ends, tokens, self.prompt_length) is None
        self._noise = None
        if latent is None or not self.is_thinking:
            self.latents.append(self._no_latent)
            return logprob
        self.latents.append(latent.values)
        return logprob if latent.logprob is None else latent.logprob

    def sampled_since(self, start: int) -> TokenChunk:
        """Return what was sampled from token `start` on."""
        end = len(self.logprobs)
        tokens = self.tokens[self.prompt_length + start : self.prompt_length + end]
        tops = None if self.top_logprobs is None else self.top_logprobs[start:end]
        return TokenChunk(tokens, self.logprobs[start:end], tops)

    @property
    def finish_reason(self) -> str:
        is_stopped = self._stopped_by is not None or self._is_complete or self.tokens[-1] in self.stop_ids
        return "stop" if is_stopped else "length"

    def fail(self, error: EngineError) -> None:
        del self.tokens[self.prompt_length + len(self.logprobs) :]  # a placeholder that nothing will replace
        self.is_done = True
        self.future.set_exception(error)

    def finish(self, routed_experts: bytes | None = None) -> None:
        """Give the request's future its result."""
        self.is_done = True
        sampled = self.tokens[self.prompt_length :]
        last = sampled[-1]
        ends = [start for _, start in self._spans[1:]] + [len(sampled)]
        stop_token = last if last in self.params.stop_token_ids else None
        self.future.set_result(
            GenerationResult(
                sampled,
                self.logprobs,
                [(version, start, end) for (version, start), end in zip(self._spans, ends, strict=True)],
                finish_reason=self.finish_reason,
                stop_reason=self._stopped_by if self._stopped_by is not None else stop_token,
                prompt_logprobs=self.prompt_logprobs,
                truncated_logprobs=self.truncated_logprobs,
                top_logprobs=self.top_logprobs,
                prompt_top_logprobs=self.prompt_top_logprobs,
                cached_tokens=self.cached_tokens,
                latents=None if self.latents is None else b"".join(row.tobytes() for row in self.latents),
                logprobs_mode=self.params.logprobs_mode,
                routed_experts=routed_experts,
            )
        )
