"""The experts of a layer as grouped matrix products: one for all experts' inputs, and one for their outputs.

The plain code of a model loops over its experts, with a few small products and a wait for the GPU each. The grouped
products of transformers compute in the type of the parameters: in float32, where autocast would take bfloat16, they
are a loop again. Here the parameters are cast as autocast does. A CPU's grouped product is a loop over experts in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

NAME = "headrace"
"""Of this implementation, among those that transformers' models can be set to."""


def grouped_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's `chosen` experts; all are [tokens, ...]."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.down_proj.dtype
    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    inverse = torch.argsort(order)
    ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=hidden.device), right=True).int()

    def project(name: str, inputs: Tensor) -> Tensor:
        outputs: Tensor = _grouped_linear(inputs, getattr(self, name).to(dtype), ends, is_transposed=self.is_transposed)
        return outputs + getattr(self, f"{name}_bias").to(dtype)[experts] if self.has_bias else outputs

    repeated = hidden.to(dtype)[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)
    inner = project("gate_up_proj" if self.has_gate else "up_proj", _permute(repeated, order, inverse))
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outputs: Tensor = _permute(project("down_proj", inner.to(dtype)), inverse, order)
    return (outputs.view(*chosen.shape, -1) * weights[..., None]).sum(1, dtype=hidden.dtype)


class _Permute(torch.autograd.Function):
    """Rows in another order. The gradient is gathered, too: torch's would add up rows by atomic operations."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


_permute: Callable[..., Tensor] = _Permute.apply
ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
