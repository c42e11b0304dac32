"""AdamW, its learning rate over the run, and the rule that a broken gradient is never applied."""

from __future__ import annotations

import logging
import math

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

log = logging.getLogger(__name__)

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over named parameters. A step whose gradient is not finite is skipped, counted and said."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        self.parameters = parameters
        self.max_grad_norm = max_grad_norm
        self.skipped = 0
        self._adamw = torch.optim.AdamW(
            parameters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )

    def step(self, lr: float) -> float:
        """Apply the gradients that have accumulated, and clear them. Returns their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        value = float(norm)
        if math.isfinite(value):
            if self.max_grad_norm is not None:
                clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm, foreach=True)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        else:
            self.skipped += 1
            log.warning("the gradient's norm is %s: this step changes nothing (%d skipped so far)", value, self.skipped)
        self.discard()
        return value

    def discard(self) -> None:
        """Forget the gradients that have accumulated."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The moments by parameter name; empty before the first step."""
        state = self._adamw.state
        return {
            f"{name}.{moment}": state[parameter][moment]
            for name, parameter in self.parameters.items()
            if parameter in state
            for moment in _MOMENTS
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over moments; they must be those of this model's parameters."""
        for name, parameter in self.parameters.items():
            found = {moment: tensors.get(f"{name}.{moment}") for moment in _MOMENTS}
            if not tensors:
                continue
            missing = [moment for moment, value in found.items() if value is None]
            if missing:
                raise ValueError(f"the optimizer state has no {', '.join(missing)} for parameter {name}")
            # `step` stays on the CPU unless the kernel wants it beside the parameter, as the fused one does.
            self._adamw.state[parameter] = {m: v.to(parameter.device) for m, v in found.items() if v is not None}


def learning_rate_factor(step: int, *, kind: str, warmup_steps: int, min_factor: float, max_steps: int) -> float:
    """The multiple of the base rate at optimizer step 1, 2, ...; `min_factor` is reached right after `max_steps`."""
    done = step - 1
    if done < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (done - warmup_steps) / max(1, max_steps - warmup_steps))
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - (1.0 - min_factor) * progress
    if kind == "cosine":
        return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {kind!r}; known: constant, linear, cosine")
