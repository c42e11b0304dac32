"""A tokenizer of bytes and some special tokens, for a tiny model and for checks without a model."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

BYTES = 256
"""Ids below it are bytes; special, markup and word tokens follow."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of Qwen3's chat format that decoding keeps as text, as Qwen3 does."""


def byte_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with the tokens of Qwen3's chat format, and one token for each of `words`."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    text = (*MARKUP_TOKENS, *words)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in text])
    return tokenizer
