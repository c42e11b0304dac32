"""Stop strings in sampled tokens, at the cost of a look at the last token.

A stop string is complete once its last character is sampled, so text is decoded only if the last token's own text
contains that character, or part of one. The text of each token is cached.

Special tokens are not part of a reply's text: a stop string may span one, and is not found in the name of one. Only a
stop string that contains the whole name of a special token is searched for in the text with special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

Decode = Callable[[list[int]], str]

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
        recent = tokens[max(start, len(tokens) - longest) :]
        return self._first(plain, self._without_special(tokens, start, recent)) or self._first(with_special, recent)

    def _first(self, stops: Sequence[str], tokens: list[int]) -> str | None:
        text = self._decode(tokens) if stops else ""
        matches = [stop for stop in stops if stop in text]
        return min(matches, key=text.index) if matches else None

    def _without_special(self, tokens: list[int], start: int, recent: list[int]) -> list[int]:
        """Return the last tokens that are not special, as many as `recent` has."""
        if self._special.isdisjoint(recent):
            return recent
        backwards = (tokens[index] for index in range(len(tokens) - 1, start - 1, -1))
        return list(islice((token for token in backwards if token not in self._special), len(recent)))[::-1]
