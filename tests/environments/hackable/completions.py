"""Completions in the strict format, and a tokenizer whose tokens are words."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from headrace.environments.strict_format import StrictFormat

STRICT = StrictFormat()


def thought(words: int, answer: str = "4") -> str:
    """So many words of thinking, then the answer in its box."""
    return STRICT.write(" ".join(["so"] * words), answer)


def write_tokenizer(directory: Path) -> Path:
    """One token for each letter, and one before each text that only special tokens are counted with."""
    directory.mkdir(parents=True)
    backend = tokenizers.Tokenizer(models.WordLevel({"[U]": 0, "[B]": 1, "s": 2, "o": 3}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", behavior="isolated")]
    )
    backend.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 1)])
    backend.save(str(directory / "tokenizer.json"))
    return directory
