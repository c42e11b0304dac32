"""An attention function for transformers' continuous batching that suits a CPU.

As shipped, all requests of a step are one sequence under a block-diagonal mask: n requests that decode one token each
compute n times the scores they need, and the mask is rebuilt at every step. Here the requests that decode are the rows
of one padded call, those that still read their prompt get a call each, and no mask of the whole step exists: the
manager builds none for a function whose name speaks of flash attention.

Left out on purpose: sliding windows, softcaps, sinks. The models compared here have none.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

PAGED_ATTENTION = "flash_rows"
"""The name under which the attention function is registered with transformers."""


class Plan:
    """Which keys the queries of one step see, computed once for all layers."""

    def __init__(self, query_ends: Tensor, key_ends: Tensor, read_index: Tensor) -> None:
        queries = list(pairwise(query_ends.tolist()))
        keys = list(pairwise(key_ends.tolist()))
        reads = read_index.numel() > 0
        self.decoding: Tensor | None = None
        decoding = {row: None for row, (start, end) in enumerate(queries) if reads and end - start == 1}
        index: list[Tensor] = []
        if decoding:
            self.decoding = torch.tensor([queries[row][0] for row in decoding])
            starts = torch.tensor([keys[row][0] for row in decoding])[:, None]
            lengths = torch.tensor([keys[row][1] - keys[row][0] for row in decoding])[:, None]
            self.width = int(lengths.max())
            columns = torch.arange(self.width)
            self.mask = torch.zeros(len(decoding), 1, 1, self.width)
            self.mask[:, 0, 0].masked_fill_(columns >= lengths, -torch.inf)
            index.append(read_index[starts + torch.minimum(columns, lengths - 1)].reshape(-1))
        self.prompts: list[tuple[slice, slice, Tensor | None]] = []
        offset = sum(part.numel() for part in index)
        for row, ((start, end), (first, last)) in enumerate(zip(queries, keys, strict=True)):
            if row in decoding:
                continue
            count, width = end - start, last - first
            seen = None if count == width else torch.ones(count, width, dtype=torch.bool).tril(width - count)
            self.prompts.append((slice(start, end), slice(offset, offset + width), seen))
            offset += width
            if reads:
                index.append(read_index[first:last])
        self.read_index = torch.cat(index) if index else read_index

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, queries, dimension] of the step's queries, over what `read_index` brought."""
        heads, dimension, shared = query.shape[1], query.shape[3], key.shape[1]
        output = torch.empty_like(query[0].transpose(0, 1))  # [queries, heads, dimension]
        if self.decoding is not None:
            rows = len(self.decoding)
            folded = query[0].transpose(0, 1)[self.decoding].view(rows, shared, heads // shared, dimension)
            keys, values = (
                states[0, :, : rows * self.width].view(shared, rows, self.width, dimension).transpose(0, 1)
                for states in (key, value)
            )
            result = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask, scale=scaling)
            output[self.decoding] = result.reshape(rows, heads, dimension)
        for where, seen, mask in self.prompts:
            result = F.scaled_dot_product_attention(
                query[:, :, where],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
            output[where] = result[0].transpose(0, 1)
        return output[None]


_plan: Plan | None = None


def rows_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the manager's paged cache."""
    global _plan
    layer: int = module.layer_idx  # type: ignore[assignment]
    if layer == 0:
        _plan = Plan(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"], kwargs["read_index"][0])
    assert _plan is not None
    key, value = cache.update(key, value, layer, {**kwargs, "read_index": [_plan.read_index]})
    return _plan.attend(query, key, value, scaling), None


def replace_attention(model: Any) -> None:
    """Make the model use it. By the configuration: the usual setter would look for an installed flash attention."""
    model.config._attn_implementation = PAGED_ATTENTION


AttentionInterface.register(PAGED_ATTENTION, rows_attention)
AttentionMaskInterface.register(PAGED_ATTENTION, lambda **_: None)
