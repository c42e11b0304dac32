"""Embedding lookup whose gradient is accumulated in place.

The gradient of a table is as large as the table and zero except for the tokens of a batch; autograd would allocate such
a tensor for each micro-batch, and a second one for a table that is also the lm-head. Left out on purpose: tables of
sharded models, and embeddings that compute more than a lookup.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import embedding


def accumulate_in_place(table: torch.nn.Module) -> None:
    """Replace the forward of a plain, trained embedding; other modules are unchanged."""
    if type(table) is Embedding and table.weight.requires_grad and not (table.max_norm or table.scale_grad_by_freq):

        def forward(input: Tensor) -> Tensor:
            return _Lookup.apply(input, table.weight, table.padding_idx)  # type: ignore[no-any-return, no-untyped-call]

        table.forward = forward  # type: ignore[method-assign]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        context.save_for_backward(tokens)
        context.weight, context.padding = weight, padding
        return embedding(tokens, weight)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None, None]:
        (tokens,) = context.saved_tensors
        weight, gradients = context.weight, grad.flatten(0, -2)
        if context.padding is not None:  # not trained, as in torch
            gradients = gradients.masked_fill(tokens.flatten()[:, None] == context.padding, 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens.flatten(), gradients.to(weight.dtype))
        return None, None, None
