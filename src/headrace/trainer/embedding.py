"""Looking tokens up in the embedding table, with a gradient that adds up in place.

The gradient of a table is as large as the table and zero but for the rows of a batch's tokens; autograd would make such
a tensor for each micro-batch, and for a table that is also the head it would keep the head's part aside meanwhile. Left
out on purpose: tables of sharded models, whose gradients belong to whoever shards, and embeddings that compute more
than a lookup.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import embedding


def add_up_in_place(table: torch.nn.Module) -> None:
    """Let a plain embedding that is trained add its gradients to those that it has."""
    if type(table) is Embedding and table.weight.requires_grad and not (table.max_norm or table.scale_grad_by_freq):
        table.forward = partial(_look_up, table)  # type: ignore[method-assign]


def _look_up(table: Embedding, tokens: Tensor) -> Tensor:
    return _LookUp.apply(tokens, table.weight, table.padding_idx)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        context.save_for_backward(tokens)
        context.weight, context.padding = weight, padding
        return embedding(tokens, weight)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None, None]:
        (tokens,) = context.saved_tensors
        weight, changes = context.weight, grad.flatten(0, -2)
        if context.padding is not None:  # it never learns, as in torch's own
            changes = changes.masked_fill(tokens.flatten()[:, None] == context.padding, 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens.flatten(), changes.to(weight.dtype))
        return None, None, None
