"""Text and bytes of single tokens, for logprobs in OpenAI's formats."""

from __future__ import annotations

import codecs
import functools
import re
from typing import Any

from headrace.inference.backend import GenerationResult, TokenChunk, TopLogprobs
from headrace.inference.schema import MIN_LOGPROB
from headrace.inference.server.streaming import BROKEN
from headrace.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""A space in vocabularies that are not byte-level."""
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}
"""The bytes that a byte-level vocabulary writes as characters: visible ones as in Latin-1, others past U+00FF."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class Offsets:
    """Character offsets of consecutive tokens in their text. All tokens of a character have its offset."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def next(self, content: bytes) -> int:
        """Return the offset of a token with these bytes."""
        if content and content[0] & 0xC0 != 0x80:  # a new character: an incomplete one before it stays broken
            self._characters += len(self._decoder.decode(b"", final=True))
        offset = self._characters
        self._characters += len(self._decoder.decode(content))
        return offset


class TokenText:
    """Text and bytes of a vocabulary's tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.raw = functools.cache(self._find_bytes)
        """Returns the bytes of a token, which may be a part of a character."""

    def text(self, token: int) -> str:
        return self.raw(token).decode(errors="replace")

    def label(self, token: int) -> str:
        """Return the text, or for a part of a character its bytes in OpenAI's notation."""
        content = self.raw(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def chat_logprobs(self, piece: TokenChunk | GenerationResult) -> dict[str, Any]:
        """Return logprobs in the format of `/v1/chat/completions`."""
        tops = piece.top_logprobs or [[]] * len(piece.token_ids)
        return {
            "content": [
                {**self._entry(token, logprob), "top_logprobs": [self._entry(*entry) for entry in top]}
                for token, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True)
            ]
        }

    def completion_logprobs(
        self, token_ids: list[int], logprobs: list[float | None], tops: list[TopLogprobs] | None, offsets: Offsets
    ) -> dict[str, Any]:
        """Return logprobs in the format of `/v1/completions`; `offsets` are those after the tokens before."""
        tables = [
            None if logprob is None else {self.label(other): finite(value) for other, value in top}
            for logprob, top in zip(logprobs, tops or [[]] * len(logprobs), strict=True)
        ]
        return {
            "tokens": [self.label(token) for token in token_ids],
            "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
            "top_logprobs": tables if tops is not None else None,
            "text_offset": [offsets.next(self.raw(token)) for token in token_ids],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(self.raw(token))}

    def _find_bytes(self, token: int) -> bytes:
        text = self._tokenizer.decode([token])
        name = self._tokenizer.convert_ids_to_tokens(token)
        if BROKEN not in text or name is None:
            lost_space = isinstance(name, str) and name.startswith(_SPACE) and not text.startswith(" ")
            return (" " + text if lost_space else text).encode()
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()
