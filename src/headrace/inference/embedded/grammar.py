"""Grammars that sampled tokens must match, and masks of the tokens that they allow next.

`llguidance` accepts tokens and computes masks in threads of its own, without the interpreter's lock, while the model
computes the step's logits: both follow from the token before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers

from headrace.inference.backend import EngineError, InvalidRequest
from headrace.inference.schema import StructuredOutputs
from headrace.inference.structured import MAX_CACHED, grammar_of

if TYPE_CHECKING:
    from headrace.inference.embedded.request import Request

MAX_THREADS = 4
"""Threads for grammars: the masks of 64 requests take under a millisecond of one core, and waking more costs CPU."""


class Matcher:
    """The state of one completion in its grammar."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self.compiled = compiled
        self.mask_words = -(-vocab_size // 32)

    def is_complete(self) -> bool:
        """Return whether nothing can follow the accepted tokens. Raises if one of them was not allowed."""
        if not self.compiled.is_stopped():
            return False
        if self.compiled.is_error():
            raise EngineError(f"a token does not match the grammar: {self.compiled.get_error()}")
        return True


class Grammars:
    """Compiles grammars for a tokenizer. The first one takes up to seconds, since it reads the whole vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compile = functools.lru_cache(MAX_CACHED)(self._compile_new)

    def matcher(self, outputs: StructuredOutputs) -> Matcher:
        """Return the state before the first token. Raises `InvalidRequest`."""
        return Matcher(self._compile(grammar_of(outputs)).deep_copy(), self._vocab_size)

    def _compile_new(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._vocabulary, grammar)
        if compiled.is_error():
            raise InvalidRequest(compiled.get_error(), key="structured_outputs")
        return compiled

    @functools.cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.no_padding()
        plain.no_truncation()
        eos = self._eos_token_ids
        return LLTokenizer(plain.to_str(), n_vocab=self._vocab_size, eos_token=eos[0] if len(eos) == 1 else eos or None)


class Masks(NamedTuple):
    """Masks that are being computed."""

    requests: Sequence[Request]
    bits: np.ndarray
    """[request, vocabulary / 32] int32, valid once `done`; the lowest bit is the first token's."""
    done: Future[None]


def start_masks(requests: Iterable[Request]) -> Masks | None:
    """Start to compute the masks of the requests that have a grammar; None if there are none."""
    matchers = {request: request.matcher for request in requests if request.matcher is not None and not request.is_done}
    if not matchers:
        return None
    bits = np.empty((len(matchers), next(iter(matchers.values())).mask_words), np.int32)
    rows = [(matcher, row) for row, matcher in enumerate(matchers.values())]
    return Masks([*matchers], bits, _threads()[0].submit(compute_masks, rows, bits))


def compute_masks(matchers: Iterable[tuple[Matcher, int]], bits: np.ndarray) -> None:
    """Write the mask of each matcher to its row of `bits`, [row, vocabulary / 32] int32."""
    if rows := [(matcher.compiled, row) for matcher, row in matchers]:
        _threads()[1].unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.strides[0], len(bits))


def accept_tokens(sampled: Iterable[tuple[Matcher, int]]) -> None:
    """Advance each matcher by its token."""
    if tokens := [(matcher.compiled, token) for matcher, token in sampled]:
        _threads()[1].consume_token_par(tokens)


@functools.cache
def _threads() -> tuple[ThreadPoolExecutor, Any]:
    """Return a thread that waits for masks, and the threads that compute them and accept tokens."""
    from llguidance import LLExecutor

    threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
    return ThreadPoolExecutor(1, thread_name_prefix="masks"), LLExecutor(threads)
