"""Optimizers and learning-rate schedules. A gradient that is not finite is never applied.

An update rule returns torch optimizers for parameters by name. Every rule treats each parameter separately, so that its
state can be saved and moved to the GPU by parameter. One learning rate serves all, since Muon's updates have the scale
of AdamW's; only gates, which are added to a model, have their own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headrace.errors import BadInput
from headrace.inference.latents import is_gate
from headrace.trainer import adam8bit
from headrace.trainer.adam8bit import Adam8bit
from headrace.trainer.ranks import whole

log = logging.getLogger(__name__)

Parameters = dict[str, Parameter]
UpdateRule = Callable[[Parameters], list[torch.optim.Optimizer]]

SLAB_BYTES = 1 << 30
"""Minimum size of a slab of host memory."""
ALIGNMENT_BYTES = 256
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at zero, for small singular values


class Muon(torch.optim.Optimizer):
    """Muon for parameters with two dimensions, or three for a stack of matrices: an orthogonalized momentum update.

        m = momentum * m + (1 - momentum) * g,    u = momentum * m + (1 - momentum) * g  (Nesterov; else m)
        p = (1 - lr * weight_decay) * p - lr * 0.2 * sqrt(max(rows, columns)) * orthogonalize(u)

    The scale gives an update the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training"). torch.optim.Muon is
    not used because it iterates in bfloat16 on CPUs, too (20 seconds a step for the tiny model), and does not support
    stacks of matrices (experts). Every rank computes the whole iteration.
    """

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(
            parameters, {"weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "ns_steps": 5, **settings}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = orthogonalize(
                    self._momentum(parameter, group["momentum"], group["nesterov"]), group["ns_steps"]
                )
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


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return an approximation of U V^T for a matrix U S V^T: Newton-Schulz iterations move singular values near 1."""
    if isinstance(matrix, DTensor):  # a shard has other singular values
        full = orthogonalize(matrix.full_tensor(), steps)
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


_STATE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
    torch.optim.SGD: ("momentum_buffer",),
}


def adamw(
    parameters: Parameters, *, weight_decay: float = 0.0, state_bits: int = 32, **settings: Any
) -> list[torch.optim.Optimizer]:
    if not parameters:
        return []
    if state_bits == 8:
        return [Adam8bit(parameters.values(), weight_decay=weight_decay, **settings)]
    return [torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=weight_decay, fused=True, **settings)]


def sgd(parameters: Parameters, **settings: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters.values(), lr=0.0, **settings)]


def muon(
    parameters: Parameters, *, hidden: Collection[str], weight_decay: float = 0.0, **settings: Any
) -> list[torch.optim.Optimizer]:
    """Return Muon for the `hidden` matrices and AdamW, with `betas` and `eps`, for the rest."""
    adamw_settings = {key: settings.pop(key) for key in ("betas", "eps") if key in settings}
    matrices = [parameter for name, parameter in parameters.items() if name in hidden]
    rest = {name: parameter for name, parameter in parameters.items() if name not in hidden}
    own = [Muon(matrices, lr=0.0, weight_decay=weight_decay, **settings)] if matrices else []
    return [*own, *adamw(rest, weight_decay=weight_decay, **adamw_settings)]


def update_rule(kind: str, module: torch.nn.Module, **settings: Any) -> UpdateRule:
    """Return the update rule of an `optim.type` with its settings bound."""
    if kind == "muon":
        settings["hidden"] = hidden_matrices(module)
    rules: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {"adamw": adamw, "muon": muon, "sgd": sgd}
    return partial(rules[kind], **settings)


def hidden_matrices(module: torch.nn.Module) -> set[str]:
    """Return the names of a Hugging Face model's matrices, and stacks of them, except for embeddings and head."""
    other = [part for part in module.modules() if isinstance(part, torch.nn.Embedding | torch.nn.Conv1d)]
    other.append(module.get_output_embeddings())  # type: ignore[operator]
    tables = {parameter for part in other for parameter in part.parameters()}
    named = module.named_parameters()
    return {n for n, value in named if value.ndim in (2, 3) and value not in tables and not is_gate(n)}


class HostArena:
    """Copies of a GPU's tensors in host memory by key; a key's memory is used again for its next copy.

    torch rounds every request of pinned memory up to a power of two, which would take a third more for a model's
    matrices: 12288 x 4096 float32 take 256 MiB instead of 192. Here tensors share slabs of such sizes.
    """

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._copies: dict[Hashable, Tensor] = {}
        self._free: list[Tensor] = []
        """The unused end of each slab."""
        self.slab_bytes = 0
        """Bytes of all slabs."""

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, made asynchronously in the order of the GPU's current stream."""
        if isinstance(tensor, DTensor):  # a view of a slab cannot be one
            return tensor.to("cpu", non_blocking=True)
        if key not in self._copies:
            self._copies[key] = self._allocate(tensor)
        return self._copies[key].copy_(tensor, non_blocking=True)

    def _allocate(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes + -tensor.nbytes % ALIGNMENT_BYTES
        place = next((number for number, row in enumerate(self._free) if len(row) >= size), None)
        if place is None:
            slab = max(SLAB_BYTES, 1 << max(size - 1, 0).bit_length())
            self._free.append(torch.empty(slab, dtype=torch.uint8, pin_memory=self._pinned))
            self.slab_bytes += slab
            place = -1
        row = self._free[place]
        self._free[place] = row[size:]
        return row[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


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
        lr_factors: Mapping[str, float] | None = None,
    ) -> None:
        """`lr_factors`: by parameter name, the multiple of the learning rate; 1 for parameters that are not in it."""
        self.parameters, self.max_grad_norm = parameters, max_grad_norm
        self.skipped = 0
        self._offloads = offload_state and any(p.device.type != "cpu" for p in parameters.values())
        by_factor: dict[float, list[Parameters]] = {}
        for name, parameter in parameters.items():
            groups = by_factor.setdefault((lr_factors or {}).get(name, 1.0), [])
            if self._offloads or not groups:
                groups.append({})
            groups[-1][name] = parameter
        self._host = HostArena()
        self._factors = {
            part: factor for factor, groups in by_factor.items() for group in groups for part in rule(group)
        }
        self._part_of = {p: part for part in self._factors for group in part.param_groups for p in group["params"]}

    def step(self, lr: float) -> float:
        """Apply the accumulated gradients and clear them; return their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = whole(get_total_norm(gradients, foreach=True))
        value = float(norm)
        if math.isfinite(value):
            if self.max_grad_norm is not None:
                clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm, foreach=True)
            self._update(lr)
        else:
            self.skipped += 1
            log.warning("the gradient norm is %s: this update is skipped (%d skipped so far)", value, self.skipped)
        self.zero_grad()
        return value

    def zero_grad(self) -> None:
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
        wanted, tensors = set(names), dict[str, Tensor]()
        for name, parameter in self.parameters.items():
            part = self._part_of[parameter]
            keys = [key for key in _state_keys(part, parameter) if f"{name}.{key}" in wanted]
            if isinstance(part, Adam8bit):
                state = {key: adam8bit.empty_state(parameter, key) for key in keys}
            else:
                state = {key: torch.zeros(()) if key == "step" else torch.zeros_like(parameter) for key in keys}
            if self._offloads:  # one parameter at a time: the GPU may have no room for the state of all
                state = self._to_host(parameter, state)
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        if self._offloads:
            torch.accelerator.synchronize()  # copies to the CPU are asynchronous
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load a state, which must be of this rule for these parameters."""
        for name, parameter in self.parameters.items():
            part = self._part_of[parameter]
            keys = _state_keys(part, parameter)
            state = {key: tensors[f"{name}.{key}"] for key in keys if f"{name}.{key}" in tensors}
            if missing := [key for key in keys if state and key not in state]:
                raise BadInput(f"the checkpoint's optimizer state has no {', '.join(missing)} of it", key=name)
            if state:  # a parameter that never had a gradient has no state
                # `step` is on the same device, as the fused kernel requires.
                part.state[parameter] = (
                    self._to_host(parameter, state)
                    if self._offloads
                    else {key: value.to(parameter.device) for key, value in state.items()}
                )

    def _update(self, lr: float) -> None:
        for part, factor in self._factors.items():
            for group in part.param_groups:
                group["lr"] = lr * factor
            if self._offloads:
                for parameter, state in part.state.items():
                    state.update({key: value.to(parameter.device, non_blocking=True) for key, value in state.items()})
            part.step()
            if self._offloads:
                for parameter, state in part.state.items():
                    state.update(self._to_host(parameter, state))

    def _to_host(self, parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy a parameter's state to its place in host memory, asynchronously."""
        return {key: self._host.copy((id(parameter), key), value) for key, value in state.items()}


def _state_keys(part: torch.optim.Optimizer, parameter: Parameter) -> tuple[str, ...]:
    return adam8bit.state_keys(parameter) if isinstance(part, Adam8bit) else _STATE[type(part)]


def learning_rate_factor(
    step: int,
    *,
    kind: str,
    max_steps: int,
    warmup_steps: int = 0,
    min_factor: float = 0.0,
    cycles: int = 1,
    decay_steps: int | None = None,
    decay_fraction: float = 0.1,
    decay_shape: str = "linear",
) -> float:
    """Return the factor of the base rate at optimizer step 1, 2, ...; `min_factor` is reached right after `max_steps`.

    `wsd` decays over the last `decay_steps`, or `decay_fraction` of all steps; the others from the end of the warmup
    on, `cosine_with_restarts` in `cycles` cycles, each from the full rate. There is no state to save.
    """
    done = step - 1
    if done < warmup_steps:
        return step / warmup_steps
    start = warmup_steps
    if kind == "wsd":
        # A warmup that overlaps with the decay shortens the decay, so that a short trial of a long run works.
        start = max(start, max_steps - (decay_steps or round(decay_fraction * max_steps)))
    passed, length = max(0, done - start), max(1, max_steps - start)
    if kind == "cosine_with_restarts" and passed < length:
        passed = cycles * passed % length  # in integers: a cycle begins exactly at its step
    progress = min(1.0, passed / length)
    shape = decay_shape if kind == "wsd" else kind
    cosine = 0.5 * (1.0 - math.cos(math.pi * progress))
    decays = {"constant": 0.0, "linear": progress, "sqrt": math.sqrt(progress), "cosine": cosine}
    return 1.0 - (1.0 - min_factor) * decays[shape.removesuffix("_with_restarts")]
