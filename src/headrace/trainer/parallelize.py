"""Compile and shard a model's decoder layers, applied from outside to an unmodified model.

Layers are compiled one by one: they are the same program, so the compiler runs once for all of them. Lengths are
symbolic, and only attention's operator (`varlen_attention.py`) depends on the rest of a row's layout. A layer's hooks,
such as those that gather sharded parameters, stay outside. Left out on purpose: compiling the whole model, which takes
minutes and gains little, and attention in padded blocks, which breaks the graph: a layer that is also checkpointed then
runs as if it were not compiled.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MAX_PROGRAMS = 64
"""Of all layers: some for each kind of attention and each recompute mode, with and without gradients."""


def compile_layers(layers: Iterable[torch.nn.Module], backend: str = "inductor", *, sharded: bool = False) -> None:
    """Compile each layer at its first call.

    With sharded parameters, their sizes would become symbolic, too: there a second row of another length makes lengths
    symbolic by a second program.
    """
    from torch._inductor import config  # takes a second to import

    # Beyond its own limit (8 for all layers) the compiler runs new programs uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_PROGRAMS)
    # Fuse the gradients of norms for all lengths: otherwise short and long rows are two programs.
    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):  # not in every version of torch
        config.triton.mix_order_reduction_non_strict_mode = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=None if sharded else True)


def shard(layers: Iterable[torch.nn.Module], root: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard parameters, gradients and optimizer state over a mesh, layer by layer (FSDP2); compute in `dtype`.

    Parameters outside of layers, such as embeddings, are in the root's group. Gradients are summed in float32, not
    averaged: the loss is already divided by counts over all ranks.
    """
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for part in (*layers, root):
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo and some NCCL reductions cannot scale
