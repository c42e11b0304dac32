"""What the front of an engine must know of a model, out of its JSON files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BadInput

BLOCK = 128
"""Tokens that vLLM's CPU cache keeps together, at most."""
SMALLEST_CACHE = 64 << 20


class ModelFacts(msgspec.Struct):
    vocab_size: int
    eos_token_ids: frozenset[int]
    positions: int | None
    """The longest sequence that the model was made for, if it says so."""
    cache_bytes: int
    """Of keys and values per token, in float32; 0 where its files do not say."""

    def cache_for(self, requests: int, length: int, free: int) -> int:
        """Bytes for so many longest requests at once, but at most a quarter of what is free."""
        needed = requests * -(-length // BLOCK) * BLOCK * (self.cache_bytes or 1 << 16)
        return max(SMALLEST_CACHE, min(needed, free // 4))


def read_facts(directory: Path, *eos_token_ids: int | None) -> ModelFacts:
    """Of a model directory; the ids given end a sequence, too."""
    whole = _read(directory / "config.json")
    config = whole.get("text_config") or whole
    if not isinstance(config.get("vocab_size"), int):
        raise BadInput(f"{directory / 'config.json'} has no vocab_size")
    ends = {token for token in eos_token_ids if token is not None}
    for source in (config, _read(directory / "generation_config.json", {})):
        given = source.get("eos_token_id")
        ends.update(given if isinstance(given, list) else [] if given is None else [given])
    return ModelFacts(config["vocab_size"], frozenset(ends), config.get("max_position_embeddings"), _cache(config))


def _cache(config: dict[str, Any]) -> int:
    heads = config.get("num_attention_heads") or 0
    kept = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // max(heads, 1)
    return 4 * 2 * (config.get("num_hidden_layers") or 0) * kept * width


def _read(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if default is None:
            raise BadInput("no such file: its directory is not a Hugging Face model", file=path) from None
        return default
    except msgspec.DecodeError as error:
        raise BadInput(str(error), file=path) from error
