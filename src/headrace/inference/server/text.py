"""Text that grows: what of a reply may be sent while more of it is to come.

Held back are characters whose bytes have not all come, what may still become a stop string or a token of the chat
format, and trailing white space, which parsers take away. Sending stays cheap for long replies: the whole text is
looked at again only once it has grown by a share of its length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headrace.inference.backend import GenerationResult, TokenChunk, TopLogprobs

MARKERS = ("<think>", "</think>", "<tool_call>")
"""Where texts become something else. Some models write them in several tokens."""
BROKEN = "\ufffd"
"""What stands for bytes that are no character, or not yet."""
SHARE = 64
"""A reply is looked at again when it has grown by one token in this many."""


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it.

    Of a whole reply, only for one that the engine ended with a string: all of any other was asked for.
    """
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def cut_end(text: str, stops: Sequence[str]) -> str:
    """The same for a text that ended with one: a parser may have taken away white space that was part of it."""
    text = cut(text, stops)
    for stop in stops:
        if stop.strip() and text == stop.strip():
            return ""
        bare = stop.rstrip()
        if bare and bare != stop and text.endswith(bare):
            return text.removesuffix(bare)
    return text


def sure_part(text: str, needles: Collection[str]) -> str:
    """The text without what may still turn into one of the needles, a character or white space that is taken away."""
    text = text.rstrip(BROKEN)
    longest = max(map(len, needles), default=0)
    begins = {needle[0] for needle in needles}
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if text[place] in begins and any(needle.startswith(text[place:]) for needle in needles):
            text = text[:place]
            break
    return text.rstrip()


class GrowingText:
    """A text of which ever more is known; gives each part of it once."""

    def __init__(self, stops: Sequence[str], needles: Collection[str]) -> None:
        self._stops = stops
        self._needles = (*stops, *needles)
        self._sent = ""

    def more(self, text: str) -> str:
        """What can be sent of the text so far. Nothing while it contradicts what was sent: it is still forming."""
        text = sure_part(cut(text, self._stops), self._needles)
        return self._send(text[len(self._sent) :]) if text.startswith(self._sent) else ""

    def rest(self, text: str) -> str:
        """What is left of the whole text."""
        pairs = enumerate(zip(self._sent, text, strict=False))
        alike = next((place for place, (sent, known) in pairs if sent != known), min(len(self._sent), len(text)))
        return self._send(text[alike:])

    def _send(self, text: str) -> str:
        self._sent += text
        return text


class Progress:
    """The tokens of a reply so far, and which of them were sent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._alternatives: list[TopLogprobs] = []
        self._sent = 0
        self._looked_at = 0

    def add(self, piece: TokenChunk) -> bool:
        """Whether it is time to look at the text again."""
        self.token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._alternatives += piece.top_logprobs or []
        if len(self.token_ids) - self._looked_at < max(1, len(self.token_ids) // SHARE):
            return False
        self._looked_at = len(self.token_ids)
        return True

    def complete(self, result: GenerationResult) -> None:
        self.token_ids = result.token_ids
        self._logprobs = result.logprobs
        self._alternatives = result.top_logprobs or []

    def unsent(self) -> TokenChunk:
        """What came since the last call."""
        start, self._sent = self._sent, len(self.token_ids)
        return TokenChunk(self.token_ids[start:], self._logprobs[start:], self._alternatives[start:] or None)
