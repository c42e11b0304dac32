"""A tokenizer whose tokens are bytes, and some markers: for a tiny model, and for trying things without any model."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

BYTES = 256
"""The ids below it are bytes; markers follow in their order."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Those of Qwen3's chat format. They are text all the same: decoding keeps them, as Qwen3 does."""


def byte_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """With the markers of Qwen3's chat format, and `words` that shall be one token each."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    text = (*MARKUP_TOKENS, *words)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in text])
    return tokenizer
