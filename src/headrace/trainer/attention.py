"""Attention over a row of packed sequences, as an attention function of transformers.

Gathers queries, keys and values of the row into padded batches, runs causal attention on each, and puts the results
back. The indices are made once for a row (`row.Layout`) and shared by all layers. Left for later: torch's varlen
kernel on a GPU, which reads packed sequences in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from headrace.errors import BadInput
from headrace.trainer.row import Block, Layout

NAME = "headrace_packed"


class UnsupportedModel(BadInput):
    """The model computes something that packed training would get wrong. The message says what."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, places, dim] in, [1, places, heads, dim] out."""
    if layout is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass `layout` on to its attention: it cannot be packed"
        )
    _refuse_other_kinds(module, sliding_window, layout.longest, options)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = [_attend(q, k, v, block, scaling) for block in layout.blocks]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, layout.outputs)[None], None


AttentionInterface.register(NAME, packed_attention)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scaling: float | None) -> torch.Tensor:
    """[places, heads, dim] in, the block's queries line after line out."""
    output = F.scaled_dot_product_attention(
        _gather(q, block.queries),
        _gather(k, block.keys),
        _gather(v, block.keys),
        attn_mask=block.visible,
        is_causal=block.visible is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _gather(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[places, heads, dim] and [sequences, length] give [sequences, heads, length, dim]."""
    heads, dim = states.shape[1:]
    # As rows of heads * dim: selecting and its gradient then move whole rows.
    rows = states.reshape(-1, heads * dim).index_select(0, places.flatten())
    return rows.view(*places.shape, heads, dim).transpose(1, 2)


def _refuse_other_kinds(module: torch.nn.Module, window: int | None, longest: int, options: dict[str, Any]) -> None:
    name = type(module).__name__
    window = window or getattr(module, "sliding_window", None)
    if window is not None and window < longest:
        raise UnsupportedModel(
            f"{name} attends to the last {window} tokens only, but a sequence has {longest}: packed attention sees all "
            f"of them; set seq_len to at most {window}"
        )
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UnsupportedModel(f"{name} uses {option!r} in its attention, which packed attention does not compute")
