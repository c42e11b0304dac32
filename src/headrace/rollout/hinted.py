"""The longest sequence of a sample with a hint before it, for limits on sequence length."""

from __future__ import annotations

MAX_TEMPLATE_TOKENS = 256
"""A generous bound on the template around a hint."""


def hinted_length(seq_len: int) -> int:
    """Return the tokens of a sample, of a hint of the same length and of the template around the hint."""
    return 2 * seq_len + MAX_TEMPLATE_TOKENS
