"""A model spread over ranks: parallelism applied from outside to a model that knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(layers: Iterable[torch.nn.Module], root: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Spread parameters, gradients and optimizer state over a mesh, layer by layer; compute in `dtype`.

    What is in no layer, the embeddings above all, tied or not, is in the root's group. Gradients are summed in float32,
    not averaged: the loss is divided by counts over all ranks already.
    """
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for part in (*layers, root):
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo and some of NCCL's sums cannot scale on the way
