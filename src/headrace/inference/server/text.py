"""Incremental text of a streamed reply.

Held back are incomplete characters, beginnings of stop strings or of special tokens, and trailing white space, which
parsers strip. To keep long replies cheap, the whole text is decoded again only after it has grown by a fraction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headrace.inference.backend import GenerationResult, TokenChunk, TopLogprobs

MARKERS = ("<think>", "</think>", "<tool_call>")
"""Texts that begin another part of a reply. Some models write them in several tokens."""
BROKEN = "\ufffd"
"""The replacement character of incomplete or invalid bytes."""
DECODE_FRACTION = 64
"""A reply is decoded again when it has grown by one token in this many."""


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


def sure_part(text: str, needles: Collection[str]) -> str:
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
        text = sure_part(cut(text, self._stops), self._needles)
        return self._send(text[len(self._sent) :]) if text.startswith(self._sent) else ""

    def rest(self, text: str) -> str:
        """Return the rest of the whole text."""
        pairs = enumerate(zip(self._sent, text, strict=False))
        alike = next((place for place, (sent, new) in pairs if sent != new), min(len(self._sent), len(text)))
        return self._send(text[alike:])

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
