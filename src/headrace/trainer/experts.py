"""The experts of a layer as grouped matrix products: one for all experts' inputs, and one for their outputs.

The plain code of a model loops over its experts, with a few small products and a wait for the GPU each. The grouped
products of transformers compute in the type of the parameters: in float32, where autocast would take bfloat16, they
are a loop again. Here the parameters are cast as autocast does. A CPU's grouped product is a loop over experts in C++.

An adapter of experts (`ExpertsLora`) is two more grouped products; the difference of the weights is never computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

GROUPED_EXPERTS = "headrace"
"""The name of this implementation in the registry of transformers."""
STACKED, TRANSPOSED = "_lora", "_lora_t"
"""Endings of the attributes with adapters of stacked weights: [experts, out, in], or [experts, in, out]."""
ALIGNED_COLUMNS = 8
"""A GPU's grouped products take rows of a multiple of 16 bytes."""


def grouped_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's `chosen` experts; all are [tokens, ...]."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.down_proj.dtype
    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    inverse = torch.argsort(order)
    ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=hidden.device), right=True).int()

    def project(name: str, inputs: Tensor) -> Tensor:
        outputs: Tensor = _grouped_linear(inputs, getattr(self, name).to(dtype), ends, is_transposed=self.is_transposed)
        if self.has_bias:
            outputs = outputs + getattr(self, f"{name}_bias").to(dtype)[experts]
        adapter = getattr(self, adapter_name(self, name), None)
        return outputs if adapter is None else outputs + adapter(inputs, ends)

    repeated = hidden.to(dtype)[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)
    inner = project("gate_up_proj" if self.has_gate else "up_proj", _permute(repeated, order, inverse))
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outputs: Tensor = _permute(project("down_proj", inner.to(dtype)), inverse, order)
    return (outputs.view(*chosen.shape, -1) * weights[..., None]).sum(1, dtype=hidden.dtype)


class ExpertsLora(torch.nn.Module):
    """The LoRA matrices of stacked experts: [experts, r, in] and [experts, out, r], whose products are 0 at first."""

    def __init__(self, experts: Any, name: str, r: int, scaling: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = getattr(experts, name)
        count, inputs, outputs = weight.shape if experts.is_transposed else weight.transpose(1, 2).shape
        a, b = torch.empty(count, r, inputs), torch.zeros(count, outputs, r)
        for matrix in a:
            torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
        self.lora_A, self.lora_B = (torch.nn.Parameter(matrix.to(weight.device)) for matrix in (a, b))
        self.scaling = scaling

    def forward(self, inputs: Tensor, ends: Tensor) -> Tensor:
        padding = -self.lora_A.shape[1] % ALIGNED_COLUMNS
        a, b = pad(self.lora_A, (0, 0, 0, padding)), pad(self.lora_B, (0, padding))
        inner = _grouped_linear(inputs, a.to(inputs.dtype), ends) * self.scaling
        outputs: Tensor = _grouped_linear(inner, b.to(inputs.dtype), ends)
        return outputs


def adapter_name(experts: Any, parameter: str) -> str:
    """Return the name of the adapter of a parameter; its ending tells whether the parameter is transposed."""
    return f"{parameter}{TRANSPOSED if experts.is_transposed else STACKED}"


def expert_parameters(model: Any) -> dict[str, tuple[Any, list[str]]]:
    """Return by module name the modules of stacked experts, and the names of their weights in order."""
    return {
        name: (module, [weight for weight, tensor in module.named_parameters(recurse=False) if tensor.ndim == 3])
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    }


class _Permute(torch.autograd.Function):
    """Reorders rows. The gradient is a gather too, while that of torch's indexing adds rows by atomic operations."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


_permute: Callable[..., Tensor] = _Permute.apply
ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS, grouped_experts)
