"""How long a sequence may become by the hint that is put before it, for whoever must have room for it."""

from __future__ import annotations

TEMPLATE_ROOM = 256
"""Tokens of a template around a hint, generously."""


def hinted_length(seq_len: int) -> int:
    """Tokens of a sample, of a hint as long as one, and of the template around that."""
    return 2 * seq_len + TEMPLATE_ROOM
