"""Streamed replies: chunks of several requests as they arrive, and the text that can be sent of each.

Held back are incomplete characters, beginnings of stop strings or of special tokens, and trailing white space, which
parsers strip. To keep long replies cheap, the whole text is decoded again only after it has grown by a fraction.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from headrace.inference.backend import Generation, GenerationResult, TokenChunk, TopLogprobs
from headrace.inference.schema import Usage
from headrace.inference.server.replies import DONE, event
from headrace.text.tokenizer import common_prefix_length

Update = TokenChunk | GenerationResult
Updates = AsyncIterator[tuple[int, Update]]
"""The index of a request with a chunk of it, or at its end its result."""
Advance = Callable[[Update], Iterable[Mapping[str, Any]]]
"""Returns the fields of the events that an update of one choice makes possible."""

MARKERS = ("<think>", "</think>", "<tool_call>")
"""Texts that begin another part of a reply. Some models write them in several tokens."""
BROKEN = "\ufffd"
"""The replacement character of incomplete or invalid bytes."""
DECODE_FRACTION = 64
"""A reply is decoded again when it has grown by one token in this many."""


async def updates_of(generations: Sequence[Generation], on_first: Callable[[float], None]) -> Updates:
    """Yield chunks and results of all requests as they arrive; `on_first` gets the seconds to the first.

    Raises `EngineError`.
    """
    arrived: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
    began: float | None = time.monotonic()

    async def follow(index: int, generation: Generation) -> None:
        try:
            async for chunk in generation.chunks():
                arrived.put_nowait((index, chunk))
            arrived.put_nowait((index, await generation.result()))
        except Exception as error:
            arrived.put_nowait((index, error))

    following = [asyncio.ensure_future(follow(index, each)) for index, each in enumerate(generations)]
    try:
        left = len(generations)
        while left:
            index, update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            if began is not None:
                on_first(time.monotonic() - began)
                began = None
            left -= isinstance(update, GenerationResult)
            yield index, update
    finally:
        for task in following:
            task.cancel()


async def stream_events(
    head: Mapping[str, Any],
    updates: Updates,
    choices: Sequence[Advance],
    first: Iterable[Mapping[str, Any]] = (),
    usage: Callable[[list[GenerationResult]], Usage] | None = None,
) -> AsyncIterator[bytes]:
    """Yield the `first` events, those of all choices, the usage of their results if requested, then `[DONE]`."""
    results: dict[int, GenerationResult] = {}
    for fields in first:
        yield event({**head, **fields})
    async with contextlib.aclosing(updates):  # type: ignore[type-var]
        async for index, update in updates:
            if isinstance(update, GenerationResult):
                results[index] = update
            for fields in choices[index](update):
                yield event({**head, **fields})
    if usage is not None:
        yield event({**head, "choices": [], "usage": usage([results[index] for index in range(len(choices))])})
    yield DONE


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string. For a whole reply, only if a stop string ended it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def cut_end(text: str, stops: Sequence[str]) -> str:
    """Cut a text that a stop string ended and whose white space a parser may have stripped."""
    text = cut(text, stops)
    for stop in stops:
        if stop.strip() and text == stop.strip():
            return ""
        bare = stop.rstrip()
        if bare and bare != stop and text.endswith(bare):
            return text.removesuffix(bare)
    return text


def sendable_part(text: str, needles: Collection[str]) -> str:
    """Return the text without a possible beginning of a needle, an incomplete character or trailing white space."""
    text = text.rstrip(BROKEN)
    longest = max(map(len, needles), default=0)
    begins = {needle[0] for needle in needles}
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if text[place] in begins and any(needle.startswith(text[place:]) for needle in needles):
            text = text[:place]
            break
    return text.rstrip()


class GrowingText:
    """A growing text of which each part is sent once."""

    def __init__(self, stops: Sequence[str], needles: Collection[str]) -> None:
        self._stops = stops
        self._needles = (*stops, *needles)
        self._sent = ""

    def more(self, text: str) -> str:
        """Return what can be sent of the text so far; nothing while it does not continue what was sent."""
        text = sendable_part(cut(text, self._stops), self._needles)
        return self._send(text[len(self._sent) :]) if text.startswith(self._sent) else ""

    def rest(self, text: str) -> str:
        """Return the rest of the whole text."""
        return self._send(text[common_prefix_length(self._sent, text) :])

    def _send(self, text: str) -> str:
        self._sent += text
        return text


class Progress:
    """The tokens of a reply so far, and how many of them were sent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._alternatives: list[TopLogprobs] = []
        self._sent = 0
        self._decoded_at = 0

    def add(self, piece: TokenChunk) -> bool:
        """Add tokens and return whether it is time to decode the text again."""
        self.token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._alternatives += piece.top_logprobs or []
        if len(self.token_ids) - self._decoded_at < max(1, len(self.token_ids) // DECODE_FRACTION):
            return False
        self._decoded_at = len(self.token_ids)
        return True

    def complete(self, result: GenerationResult) -> None:
        self.token_ids = result.token_ids
        self._logprobs = result.logprobs
        self._alternatives = result.top_logprobs or []

    def unsent(self) -> TokenChunk:
        """Return the tokens since the last call."""
        start, self._sent = self._sent, len(self.token_ids)
        return TokenChunk(self.token_ids[start:], self._logprobs[start:], self._alternatives[start:] or None)
