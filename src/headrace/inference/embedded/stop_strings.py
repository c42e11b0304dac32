"""Stop strings in what is sampled, at the cost of a look at the newest token.

A string is complete once its last character is there, and that is in the text of the token that completes it. So text
is decoded only where the token alone has such a character, or may have part of one; what a token says alone is kept.

Special tokens are left out of the text of a reply, and so here: a string may lie around one, and is not found in what
one is called. Only a string that spells a whole one is searched for with all of them in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

Decode = Callable[[list[int]], str]

PART = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""
PADDING = " "
"""What some decoders leave out at the beginning of a text."""


class StopStrings:
    """Those of all requests of an engine, whose tokens `decode` makes text of, the special ones too."""

    def __init__(self, decode: Decode, special_tokens: Collection[int] = ()) -> None:
        self._decode = decode
        self._special = frozenset(special_tokens)
        self._spelled = [text for token in self._special if (text := decode([token]))]
        self._texts: dict[int, str] = {}

    def completed(self, stops: Sequence[str], tokens: list[int], first: int) -> str | None:
        """The one that the last token completes; only those from the `first` on count."""
        if not self._may_complete(stops, tokens[-1]):
            return None
        longest = 4 * max(map(len, stops)) + 4  # a character takes at most four tokens
        said = [stop for stop in stops if not self._spells_special(stop)]
        spelled = [stop for stop in stops if stop not in said]
        newest = tokens[max(first, len(tokens) - longest) :]
        return self._first(said, self._said(tokens, first, newest)) or self._first(spelled, newest)

    def _first(self, stops: Sequence[str], tokens: list[int]) -> str | None:
        text = self._decode(tokens) if stops else ""
        found = [stop for stop in stops if stop in text]
        return min(found, key=text.index) if found else None

    def _said(self, tokens: list[int], first: int, newest: list[int]) -> list[int]:
        """As many tokens as the newest, without special ones."""
        if self._special.isdisjoint(newest):
            return newest
        back = (tokens[place] for place in range(len(tokens) - 1, first - 1, -1))
        return list(islice((token for token in back if token not in self._special), len(newest)))[::-1]

    def _spells_special(self, stop: str) -> bool:
        return any(special in stop for special in self._spelled)

    def _may_complete(self, stops: Sequence[str], token: int) -> bool:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])
        return PART in text or any(stop[-1] == PADDING or stop[-1] in text for stop in stops)
