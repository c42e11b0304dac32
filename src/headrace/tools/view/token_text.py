"""The text of single tokens, from a tokenizer that is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from headrace.errors import BadInput
from headrace.text.hub import cached_model_directory
from headrace.text.tokenizer import Tokenizer
from headrace.transport.files import STEP
from headrace.transport.run_dir import RunDir

INCOMPLETE = "\ufffd"
"""What the decoder writes for bytes that are a part of a character."""
MAX_CHARACTER_TOKENS = 8
"""Tokens of one character, at most."""


class TokenTexts:
    """A tokenizer with the texts of the tokens that were asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a")[-1:]  # some decoders drop the space before the first token
        self._start = len(tokenizer.decode(self._anchor))
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; of a character that several tokens make up, the first has it."""
        if new := list(dict.fromkeys(token for token in token_ids if token not in self._known)):
            decoded = self._tokenizer.backend.decode_batch(
                [[*self._anchor, token] for token in new], skip_special_tokens=False
            )
            self._known |= {token: text[self._start :] for token, text in zip(new, decoded, strict=True)}
        texts = [self._known[token] for token in token_ids]
        place = 0
        while place < len(texts):
            length = 1
            if INCOMPLETE in texts[place]:
                for end in range(place + 2, min(place + MAX_CHARACTER_TOKENS, len(texts)) + 1):
                    joined = self._tokenizer.decode([*self._anchor, *token_ids[place:end]])[self._start :]
                    if INCOMPLETE not in joined:
                        length = end - place
                        texts[place:end] = [joined, *[""] * (length - 1)]
                        break
            place += length
        return texts


def find_token_texts(run: RunDir, model: str | None) -> TokenTexts | None:
    """Return the texts of the tokens of a run's model; None if its tokenizer is not on this machine."""
    try:
        place: Path | None = run.final_model
        if not (run.final_model / "tokenizer.json").is_file():
            if saved := sorted(run.checkpoints.glob(f"{STEP}/model/tokenizer.json")):
                place = saved[-1].parent
            else:
                place = None if model is None else cached_model_directory(model, fetch_later=True)
        return None if place is None else _load(place)
    except BadInput:
        return None


@lru_cache(maxsize=1)
def _load(directory: Path) -> TokenTexts:
    """Load a tokenizer; only the last is kept, since large ones take a hundred megabytes."""
    return TokenTexts(Tokenizer(directory))
