"""Stop strings in what is sampled, at the cost of a look at the newest token.

A string is complete once its last character is there, and that is in the text of the token that completes it. So text
is decoded only where the token alone has such a character, or may have part of one; what a token says alone is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

PART = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""
PADDING = " "
"""What some decoders leave out at the beginning of a text."""


class StopStrings:
    """Those of all requests of an engine, whose tokens `decode` makes text of."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def completed(self, stops: Sequence[str], tokens: list[int], first: int) -> str | None:
        """The one that the last token completes; only those from the `first` on count."""
        if not self._may_complete(stops, tokens[-1]):
            return None
        longest = 4 * max(map(len, stops)) + 4  # a character takes at most four tokens
        text = self._decode(tokens[max(first, len(tokens) - longest) :])
        found = [stop for stop in stops if stop in text]
        return min(found, key=text.index) if found else None

    def _may_complete(self, stops: Sequence[str], token: int) -> bool:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])
        return PART in text or any(stop[-1] == PADDING or stop[-1] in text for stop in stops)
