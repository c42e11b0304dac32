"""Muon: momentum with an orthogonalized update, for the matrices of hidden layers.

    m = momentum * m + (1 - momentum) * g,    u = momentum * m + (1 - momentum) * g  (Nesterov; else m)
    p = (1 - lr * weight_decay) * p - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

The scale gives an update the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training"), so that the same
learning rate fits. Written by hand because torch.optim.Muon iterates in bfloat16 everywhere, which takes a CPU without
such instructions 20 seconds a step for the tiny model, and because it does not support stacks of matrices (experts).
Left out on purpose: sharing the iteration among ranks; each computes all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at zero, for small singular values


class Muon(torch.optim.Optimizer):
    """Muon over parameters with two dimensions, or three for a stack of matrices."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        settings = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = orthogonal(self._momentum(parameter, group["momentum"], group["nesterov"]), group["ns_steps"])
                scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor, momentum: float, nesterov: bool) -> Tensor:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if nesterov else buffer


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton-Schulz iterations that move singular values near 1."""
    if isinstance(matrix, DTensor):  # a shard has other singular values
        full = orthogonal(matrix.full_tensor(), steps)
        replicated = [Replicate()] * matrix.device_mesh.ndim
        return DTensor.from_local(full, matrix.device_mesh, replicated).redistribute(placements=matrix.placements)
    a, b, c = _COEFFICIENTS
    x: Tensor = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrix.dtype)
