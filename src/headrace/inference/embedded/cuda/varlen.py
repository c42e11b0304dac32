"""torch's attention over sequences of any lengths that lie back to back, in any of the versions that have it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# Grouped heads need no telling before torch 2.12.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_begins: Tensor,
    key_begins: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[token, head, dimension] in and out. Each sequence asks with its last tokens: the kernel aligns the ends."""
    output = varlen_attn(
        query,
        key,
        value,
        query_begins,
        key_begins,
        longest_query,
        longest_key,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        **_GROUPED,
    )
    assert isinstance(output, Tensor)  # and not a pair, which it gives when asked for more
    return output
