"""Drafts for speculative decoding: guesses of a request's next tokens, from the other requests with its prompt.

Rollouts of a group have one prompt, and often continue the same words in the same way. So the draft of a request is
what followed its last tokens before: in its prompt, in a request with the same prompt, finished or not, or in itself.
A step computes the tokens of a draft together with the request's last token, samples after each of them, and keeps what
it sampled up to the first token that differs from the draft. A token is always sampled from the model's own
distribution, so the result does not depend on drafts; only the number of steps does.

Drafts pay while few requests run, when a step of a GPU mostly reads weights: in the tail of a batch. A step with drafts
cannot be launched before the last one was read. So there are none while they gain little (`Drafter.prepare`).
No torch.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.inference.embedded.block_manager import TOKEN_TYPE
from headrace.inference.embedded.request import Request

MAX_REQUESTS = 32
"""Running requests up to which there are drafts."""
CONTEXTS = (6, 2)
"""Tokens before a draft that have occurred before: more are preferred."""
MAX_INDEXED_REQUESTS = 2 * MAX_REQUESTS
"""Running requests up to which others with their prompts are indexed, so that there are drafts without delay."""
MAX_KEPT_REQUESTS = 2 * MAX_INDEXED_REQUESTS
"""Running requests above which nothing stays indexed."""
INDEXED_PER_STEP = 1024
"""Tokens that are indexed per step, while the GPU computes."""
MAX_KEPT_TOKENS = 1 << 20
"""Tokens of finished requests that are kept, four bytes each."""
MAX_KEPT_TEXTS = 8
"""Finished requests with one prompt that are kept, the last ones."""
MAX_INDEXED_TEXTS = 64
"""Texts in the index of a prompt; further requests have a new one, so that it does not grow without end."""
INITIAL_TOKENS = 2
"""Tokens of a request's first draft; later ones have one more than the model agreed with, or twice as many after a
draft that was right."""
MIN_GAIN = 1.8
"""Tokens per request and step from which drafts pay. A step with drafts waits for Python, about a millisecond: with a
model of 135M parameters it takes 1.65 times as long as one without, with larger ones less."""
INITIAL_GAIN = 2.5
SMOOTHING = 1 / 16
"""Weight of the last step in the moving average of gains."""
PAUSE_STEPS = 64
"""Steps without drafts after their gain was too small."""
POSITION_BITS = 32
"""Of a place in a text: its number and a position in one integer."""


class Text(NamedTuple):
    """A prompt and what was sampled after it."""

    tokens: Sequence[int]
    """Of a running request its own list, which grows. It ends with `PENDING` while a step is in flight."""
    prompt_length: int


def contexts(tokens: Sequence[int], length: int, start: int, end: int) -> list[bytes]:
    """Return the `length` tokens before each of the positions [start, end)."""
    row = array(TOKEN_TYPE, tokens[start - length : end - 1]).tobytes()
    size = array(TOKEN_TYPE).itemsize
    return [row[size * first : size * (first + length)] for first in range(end - start)]


class PromptIndex:
    """Texts with one prompt, by the tokens before each position in them; the last of equal ones counts."""

    def __init__(self, finished: Sequence[Text]) -> None:
        """`finished` texts are indexed by `index_finished`."""
        self._texts: list[Text] = []
        self._unindexed = deque(finished)
        self._running: dict[Request, tuple[int, int]] = {}
        """The number of each one's text, and the positions in it that are indexed."""
        self._places: list[dict[bytes, int]] = [{} for _ in CONTEXTS]
        """The place after each context."""

    @property
    def is_used(self) -> bool:
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        return len(self._texts) >= MAX_INDEXED_TEXTS

    def index_finished(self, budget: int) -> int:
        """Index finished texts until `budget` tokens are used up, and return what is left of it."""
        while self._unindexed and budget > 0:
            text = self._unindexed.popleft()
            self._index(self._add(text), 0, len(text.tokens))
            budget -= len(text.tokens)
        return budget

    def join(self, request: Request) -> None:
        """Add a running request, whose tokens `update` indexes."""
        self._running[request] = self._add(Text(request.tokens, request.prompt_length)), 0

    def leave(self, request: Request) -> None:
        """Index nothing more of a request."""
        del self._running[request]

    def update(self, request: Request) -> int:
        """Index the new tokens of a running request, and return how many they are."""
        number, indexed = self._running[request]
        known = request.prompt_length + len(request.logprobs)
        self._index(number, indexed, known)
        self._running[request] = number, known
        return known - indexed

    def _add(self, text: Text) -> int:
        """Add a text, and return its number."""
        self._texts.append(text)
        return len(self._texts) - 1

    def _index(self, number: int, first: int, end: int) -> None:
        """Index the positions [first, end) of a text, those in the prompt of the first text only."""
        text = self._texts[number]
        for length, places in zip(CONTEXTS, self._places, strict=True):
            start = max(first, length, text.prompt_length if number else 0)
            if start < end:
                place = itertools.count(number << POSITION_BITS | start)
                places.update(zip(contexts(text.tokens, length, start, end), place, strict=False))

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the last of `tokens` before; none if nothing did."""
        for length, places in zip(CONTEXTS, self._places, strict=True):
            place = places.get(array(TOKEN_TYPE, tokens[-length:]).tobytes())
            if place is not None:
                number, end = place >> POSITION_BITS, place & ((1 << POSITION_BITS) - 1)
                return list(self._texts[number].tokens[end : end + count])
        return []


class Drafter:
    """Makes drafts of up to `max_tokens` tokens, from finished requests and those that run."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._finished: OrderedDict[int, deque[Text]] = OrderedDict()
        """By the hash of the prompt, the one that was used last at the end."""
        self._kept_tokens = 0
        self._indexes: dict[int, PromptIndex] = {}
        self._drafting: dict[Request, PromptIndex] = {}
        """The running requests that are indexed."""
        self._lengths: dict[Request, int] = {}
        """Of the next draft."""
        self._gain = INITIAL_GAIN
        self._steps_until_next = 0

    def add_finished(self, request: Request) -> None:
        """Keep the tokens of a finished request, and forget the oldest ones if there are too many."""
        if not self._max_tokens:
            return
        key = prompt_key(request)
        text = Text(array(TOKEN_TYPE, request.tokens), request.prompt_length)
        texts = self._finished.setdefault(key, deque())
        texts.append(text)
        self._finished.move_to_end(key)
        self._kept_tokens += len(text.tokens)
        if len(texts) > MAX_KEPT_TEXTS:
            self._kept_tokens -= len(texts.popleft().tokens)
        while self._kept_tokens > MAX_KEPT_TOKENS:
            _, texts = self._finished.popitem(last=False)
            self._kept_tokens -= sum(len(text.tokens) for text in texts)

    def prepare(self, running: Sequence[Request], max_rows: int) -> bool:
        """Return whether the next step of these requests, if it has no prefill, should have drafts; index some of what
        is needed for them. With drafts a step has at most `max_rows` tokens."""
        if not self._max_tokens or not 0 < len(running) <= MAX_INDEXED_REQUESTS:
            if not 0 < len(running) <= MAX_KEPT_REQUESTS:
                for each in (self._indexes, self._drafting, self._lengths):
                    each.clear()
            return False
        if self._steps_until_next:
            self._steps_until_next -= 1
            return False
        if 2 * len(running) > max_rows or not all(request.is_plain and request.matcher is None for request in running):
            return False
        for request in [other for other in self._drafting if other.is_done]:
            self._close_index(request)
        return self._index_within_budget(running) and len(running) <= MAX_REQUESTS

    def _index_within_budget(self, running: Sequence[Request]) -> bool:
        """Index the running requests and finished ones with their prompts; return whether all of them are indexed."""
        budget = INDEXED_PER_STEP
        for request in running:
            is_new = request not in self._drafting
            if is_new:
                self._open_index(request)
            if is_new or len(running) > MAX_REQUESTS:  # else `index_sampled` does it, while the GPU computes
                budget -= self._drafting[request].update(request)
            if budget <= 0:
                return False
        for index in self._indexes.values():
            budget = index.index_finished(budget)
            if budget <= 0:
                return False
        return True

    def draft(self, requests: Sequence[Request], max_rows: int) -> dict[Request, list[int]]:
        """Return the drafts of requests whose last token is known, if there are any; with them a step has at most
        `max_rows` tokens."""
        drafts = {}
        most = min(self._max_tokens, max_rows // len(requests) - 1)
        for request in requests:
            length = min(most, self._lengths[request], request.max_length - len(request.tokens) - 1)
            if length > 0 and (draft := self._drafting[request].draft(request.tokens, length)):
                drafts[request] = draft
        return drafts

    def index_sampled(self, requests: Iterable[Request]) -> None:
        """Index known tokens of running requests, while the GPU computes their next ones."""
        budget = INDEXED_PER_STEP
        for request in requests:
            budget -= self._drafting[request].update(request)
            if budget <= 0:
                return

    def observe(self, sampled: Mapping[Request, int], drafts: Mapping[Request, Sequence[int]]) -> None:
        """Count the tokens that each request of a step sampled, of which some had these drafts."""
        for request, draft in drafts.items():
            count = sampled[request]
            self._lengths[request] = 2 * len(draft) if count > len(draft) else count
        self._gain += SMOOTHING * (sum(sampled.values()) / len(sampled) - self._gain)
        if self._gain < MIN_GAIN:
            self._gain = INITIAL_GAIN
            self._steps_until_next = PAUSE_STEPS

    def _open_index(self, request: Request) -> None:
        """Add a running request to the index of its prompt, which is made if this is the first."""
        key = prompt_key(request)
        index = self._indexes.get(key)
        if index is None or index.is_full:
            index = self._indexes[key] = PromptIndex(self._finished.get(key, []))
        index.join(request)
        self._drafting[request] = index
        self._lengths[request] = INITIAL_TOKENS

    def _close_index(self, request: Request) -> None:
        """Remove a finished request, and the index of its prompt if no other one needs it."""
        index = self._drafting.pop(request)
        del self._lengths[request]
        index.leave(request)
        key = prompt_key(request)
        if not index.is_used and self._indexes.get(key) is index:
            del self._indexes[key]


def prompt_key(request: Request) -> int:
    """Return a hash of the prompt, and of the salt, since the time of a request tells whether its drafts were right.

    Two prompts with the same hash would only spoil drafts.
    """
    return hash((request.cache_salt, tuple(request.tokens[: request.prompt_length])))
