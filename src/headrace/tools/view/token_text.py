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


def find_tokenizer(run: RunDir, model: str | None) -> Tokenizer | None:
    """Return the tokenizer of a run's model; None if it is not on this machine."""
    places = [run.final_model, *sorted(run.checkpoints.glob(f"{STEP}/model"), reverse=True)]
    place = next((place for place in places if (place / "tokenizer.json").is_file()), None)
    try:
        place = place or (None if model is None else cached_model_directory(model, fetch_later=True))
        return None if place is None else _load(place)
    except BadInput:
        return None


@lru_cache(maxsize=1)
def _load(directory: Path) -> Tokenizer:
    """Load a tokenizer; only the last is kept, since large ones take a hundred megabytes."""
    return Tokenizer(directory)


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of a character that several tokens make up, the first has it."""
    backend = tokenizer.backend
    anchor = tokenizer.encode("a")[-1:]  # some decoders drop the space before the first token
    start = len(tokenizer.decode(anchor))
    unique = list(dict.fromkeys(token_ids))
    decoded = backend.decode_batch([[*anchor, token] for token in unique], skip_special_tokens=False)
    of_token = {token: text[start:] for token, text in zip(unique, decoded, strict=True)}
    texts = [of_token[token] for token in token_ids]
    place = 0
    while place < len(texts):
        length = 1
        if INCOMPLETE in texts[place]:
            for end in range(place + 2, min(place + MAX_CHARACTER_TOKENS, len(texts)) + 1):
                joined = tokenizer.decode([*anchor, *token_ids[place:end]])[start:]
                if INCOMPLETE not in joined:
                    length = end - place
                    texts[place:end] = [joined, *[""] * (length - 1)]
                    break
        place += length
    return texts
