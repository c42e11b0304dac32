"""AdamW with its two moments in 8 bits each: 2 bytes of state per parameter instead of 8, also in checkpoints.

A moment is stored in blocks of consecutive entries of a row, as one byte each and one float32 scale, the largest
magnitude in the block. A byte q stands for scale * (q / levels) ** power, which has finer steps for small entries.
Rounding is random and unbiased: a step changes the second moment by a thousandth, much less than the distance of two
bytes, so that with rounding to the nearest it would never change.

The random numbers depend on the step alone, so a resumed run repeats its steps. Blocks are in rows, so that the state
of a parameter that is sharded by rows is sharded in the same way. Left out on purpose: parameters with one dimension,
which are few and stay in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.trainer.ranks import local_part

BLOCK_ENTRIES = 256
"""Entries of a moment that share a scale."""
MAX_CHUNK_ENTRIES = 1 << 24
"""Entries that are updated at a time: about twenty temporary values for each."""
_POWERS = {"exp_avg": 4, "exp_avg_sq": 6}
_LEVELS = {"exp_avg": 127, "exp_avg_sq": 255}
"""Levels of one sign: the first moment has two signs."""
_CODES, _SCALES = "_codes", "_scales"
"""Endings of the names of a moment's two tensors."""


class Adam8bit(torch.optim.Optimizer):
    """AdamW, with the moments of parameters with two or more dimensions in 8 bits."""

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update({key: empty_state(parameter, key) for key in state_keys(parameter)})
                state["step"] += 1
                _update_parameter(parameter, state, group)


def state_keys(parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the tensors in a parameter's state."""
    parts = ("",) if parameter.ndim < 2 else (_CODES, _SCALES)
    return ("step", *(moment + part for moment in _POWERS for part in parts))


def empty_state(parameter: Tensor, key: str) -> Tensor:
    """Return the initial value of a part of a parameter's state, sharded as the parameter is."""
    if key == "step":
        return torch.zeros(())
    if key.endswith(_SCALES):
        return _empty_scales(parameter)
    return torch.zeros_like(parameter, dtype=torch.uint8 if key.endswith(_CODES) else torch.float32)


def _empty_scales(parameter: Tensor) -> Tensor:
    local = local_part(parameter)
    blocks = -(-local.shape[-1] // BLOCK_ENTRIES)
    scales = local.new_zeros((*local.shape[:-1], blocks), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], blocks))
    stride = tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))
    return DTensor.from_local(scales, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def _update_parameter(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    step = int(state["step"])
    weights, gradient = local_part(parameter), local_part(parameter.grad)
    local = {key: local_part(value) for key, value in state.items() if key != "step"}
    if weights.ndim < 2:
        _adamw_step(weights, gradient, local["exp_avg"], local["exp_avg_sq"], step, group)
        return
    random = torch.Generator(weights.device).manual_seed(step)
    rows = max(1, MAX_CHUNK_ENTRIES // weights.shape[-1])
    tensors = {"weights": weights, "gradient": gradient, **local}
    chunks = [torch.split(each.view(-1, each.shape[-1]), rows) for each in tensors.values()]
    for chunk in zip(*chunks, strict=True):
        views = dict(zip(tensors, chunk, strict=True))
        moments = {key: decode(views[key + _CODES], views[key + _SCALES], key) for key in _POWERS}
        _adamw_step(views["weights"], views["gradient"], moments["exp_avg"], moments["exp_avg_sq"], step, group)
        for key, moment in moments.items():
            codes, scales = encode(moment, key, random)
            views[key + _CODES].copy_(codes)
            views[key + _SCALES].copy_(scales)


def _adamw_step(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, group: dict[str, Any]
) -> None:
    """Update moments and weights in place, as torch.optim.AdamW does."""
    first, second = group["betas"]
    gradient = gradient.to(mean.dtype)
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    denominator = square.sqrt().div_(math.sqrt(1 - second**step)).add_(group["eps"])
    weights.mul_(1 - group["lr"] * group["weight_decay"])
    weights.addcdiv_(mean, denominator, value=-group["lr"] / (1 - first**step))


def encode(moment: Tensor, key: str, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a moment [rows, width] as bytes, rounded at random without bias, and a scale per block."""
    power, levels = _POWERS[key], _LEVELS[key]
    blocks = _split_into_blocks(moment)
    scales = blocks.abs().amax(-1)
    shares = (blocks.abs() / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).clamp(max=1)
    below = (shares.pow(1 / power) * levels).floor().clamp(max=levels - 1)
    low, high = ((below + each).div(levels).pow(power) for each in (0, 1))
    chance = (shares - low) / (high - low)
    codes = below + (torch.rand(shares.shape, device=shares.device, generator=random) < chance)
    if key == "exp_avg":  # the sign is in the upper half
        codes = torch.where(blocks < 0, codes + 128, codes)
    else:  # never 0, which would divide by eps
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(-2)[:, : moment.shape[-1]], scales


def decode(codes: Tensor, scales: Tensor, key: str) -> Tensor:
    """Return a moment [rows, width], float32, from its bytes [rows, width] and scales [rows, blocks]."""
    values = _split_into_blocks(codes.to(torch.float32))
    is_negative = values >= (128 if key == "exp_avg" else 256)
    magnitudes = torch.where(is_negative, values - 128, values).div(_LEVELS[key]).pow(_POWERS[key])
    moment = torch.where(is_negative, -magnitudes, magnitudes) * scales[..., None]
    return moment.flatten(-2)[:, : codes.shape[-1]].contiguous()


def _split_into_blocks(rows: Tensor) -> Tensor:
    """Return rows [rows, width] as [rows, blocks, BLOCK_ENTRIES], with zeros at the end."""
    missing = -rows.shape[-1] % BLOCK_ENTRIES
    return torch.nn.functional.pad(rows, (0, missing)).view(len(rows), -1, BLOCK_ENTRIES)
