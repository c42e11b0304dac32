"""Optimizers. A gradient that is not finite is never applied.

An update rule makes torch optimizers for parameters by name. Every rule treats each parameter separately, so that its
state can be saved and moved to the GPU by parameter. Left out on purpose: a learning rate per kind of parameter, since
Muon's updates have the scale of AdamW's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headrace.errors import BadInput
from headrace.trainer.muon import Muon

log = logging.getLogger(__name__)

Parameters = dict[str, Parameter]
UpdateRule = Callable[[Parameters], list[torch.optim.Optimizer]]

_STATE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
    torch.optim.SGD: ("momentum_buffer",),
}


def adamw(
    parameters: Parameters,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[torch.optim.Optimizer]:
    if not parameters:
        return []
    return [torch.optim.AdamW(parameters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)]


def muon(
    parameters: Parameters,
    *,
    hidden: Collection[str],
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[torch.optim.Optimizer]:
    """Return Muon for the `hidden` matrices and AdamW for the rest."""
    matrices = [parameter for name, parameter in parameters.items() if name in hidden]
    rest = {name: parameter for name, parameter in parameters.items() if name not in hidden}
    others = adamw(rest, weight_decay=weight_decay, betas=betas, eps=eps)
    if not matrices:
        return others
    own = Muon(
        matrices,
        lr=0.0,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
    )
    return [own, *others]


def sgd(
    parameters: Parameters, *, weight_decay: float = 0.0, momentum: float = 0.0, nesterov: bool = False
) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(parameters.values(), lr=0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    ]


def update_rule(kind: str, module: torch.nn.Module, **settings: Any) -> UpdateRule:
    """Return the rule of a config's `optim.type` with its settings bound."""
    if kind == "muon":
        return partial(muon, hidden=hidden_matrices(module), **settings)
    rules: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {"adamw": adamw, "sgd": sgd}
    return partial(rules[kind], **settings)


def hidden_matrices(module: torch.nn.Module) -> set[str]:
    """Return the names of a Hugging Face model's matrices, and stacks of them, except for embeddings and head."""
    other = [part for part in module.modules() if isinstance(part, torch.nn.Embedding | torch.nn.Conv1d)]
    other.append(module.get_output_embeddings())  # type: ignore[operator]
    tables = {parameter for part in other for parameter in part.parameters()}
    return {name for name, value in module.named_parameters() if value.ndim in (2, 3) and value not in tables}


class Optimizer:
    """An update rule over named parameters. A step whose gradient is not finite is skipped, counted and logged.

    With `offload_state` the state is in CPU memory between steps, and on the GPU for one parameter at a time.
    """

    def __init__(
        self,
        parameters: Parameters,
        rule: UpdateRule = adamw,
        *,
        max_grad_norm: float | None = 1.0,
        offload_state: bool = False,
    ) -> None:
        self.parameters = parameters
        self.max_grad_norm = max_grad_norm
        self.skipped = 0
        self._offloads = offload_state and any(p.device.type != "cpu" for p in parameters.values())
        groups = [{name: p} for name, p in parameters.items()] if self._offloads else [parameters]
        self._parts = [part for group in groups for part in rule(group)]
        self._part_of = {p: part for part in self._parts for group in part.param_groups for p in group["params"]}

    def step(self, lr: float) -> float:
        """Apply the accumulated gradients and clear them; return their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        if hasattr(norm, "full_tensor"):  # of sharded parameters
            norm = norm.full_tensor()
        value = float(norm)
        if math.isfinite(value):
            if self.max_grad_norm is not None:
                clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm, foreach=True)
            self._update(lr)
        else:
            self.skipped += 1
            log.warning("the gradient norm is %s: this update is skipped (%d skipped so far)", value, self.skipped)
        self.discard()
        return value

    def discard(self) -> None:
        """Clear the accumulated gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the state by parameter name; empty before the first step."""
        if self._offloads:
            torch.accelerator.synchronize()  # copies to the CPU are asynchronous
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self._part_of[parameter].state.get(parameter, {}).items()
        }

    def empty_state(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return tensors to load a saved state into: those of `names` that belong to these parameters."""
        wanted = set(names)
        return {
            f"{name}.{key}": torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
            for name, parameter in self.parameters.items()
            for key in _STATE[type(self._part_of[parameter])]
            if f"{name}.{key}" in wanted
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load a state, which must be of this rule for these parameters."""
        left = dict(tensors)
        for name, parameter in self.parameters.items():
            part = self._part_of[parameter]
            keys = _STATE[type(part)]
            state = {key: left.pop(f"{name}.{key}") for key in keys if f"{name}.{key}" in left}
            if state and len(state) < len(keys):
                missing = [key for key in keys if key not in state]
                raise BadInput(f"the checkpoint's optimizer state has no {', '.join(missing)} of it", key=name)
            if state:  # a parameter that never had a gradient has no state
                # `step` is on the same device, as the fused kernel requires.
                device = torch.device("cpu") if self._offloads else parameter.device
                part.state[parameter] = {key: value.to(device) for key, value in state.items()}
        if left:
            raise BadInput(
                f"the checkpoint's optimizer state has {min(left)}, which this optimizer does not use: it was saved "
                "for another model or with another optimizer",
                key="optim.type",
                fix="Resume with the type that it was saved with.",
            )

    def _update(self, lr: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            if self._offloads:
                _move_state(part, None)
            part.step()
            if self._offloads:
                _move_state(part, torch.device("cpu"))


def _move_state(part: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move the state to a device, or to that of its parameter, asynchronously on the GPU's stream."""
    for parameter, state in part.state.items():
        for key, value in state.items():
            state[key] = value.to(device or parameter.device, non_blocking=True)
