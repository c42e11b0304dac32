"""How much memory the KV cache gets where nobody says."""

from __future__ import annotations

from typing import Any

import torch

from headrace.errors import BadInput
from headrace.inference.colocation import ALTERNATE_CACHE_SHARE, OVERLAP_CACHE_SHARE, ColocatedTrainer
from headrace.machine import free_memory

ALONE = 0.9
"""The share of what is left on a GPU of its own."""
ON_CPU = 1 / 8
"""The window of those that are sampled from may take up to twice as much again."""
CONTEXT = 600 << 20
"""About what a process has on a GPU besides what torch knows of: its context, and libraries."""
WORKING, WORKING_SHARE = 3 << 29, 0.04
"""For graphs, logits and activations of the engine: so much, or that share of the GPU if it is more."""


def cache_memory(model: Any, gigabytes: float | None, shared: ColocatedTrainer | None) -> int:
    """Bytes for the keys and values of a model that is loaded; `shared` is its device, if that has a trainer, too."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    if model.device.type == "cpu":
        return int(free_memory() * ON_CPU)
    free, total = torch.cuda.mem_get_info(model.device)
    own = torch.cuda.memory_reserved(model.device) + CONTEXT
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return cache_budget(free, total, own, parameters, shared)


def cache_budget(free: int, total: int, own: int, parameters: int, shared: ColocatedTrainer | None) -> int:
    """Of a GPU with `total` bytes of which `free` are, and this process has `own`.

    What the trainer will hold is left to it, and to other servers what this one has, be they there already or not.
    """
    working = max(WORKING, int(WORKING_SHARE * total))
    if shared is None:
        return max(0, int((free - working) * ALONE))
    trainer = int(parameters * shared.bytes_per_parameter)
    left = min(free - working, (total - trainer) // shared.servers - own - working)
    if left <= 0:
        raise BadInput(
            f"one GPU of {total / 2**30:.1f} GiB is too small for this model: its trainer will hold about "
            f"{trainer / 2**30:.1f} GiB, and the engine has {own / 2**30:.1f} already. Train an adapter "
            "([trainer.lora]), keep the optimizer's state in CPU memory (trainer.optim.offload_state), or take a "
            "smaller model; inference.kv_cache_gb overrides this estimate"
        )
    return int(left * (ALTERNATE_CACHE_SHARE if shared.lock_directory is not None else OVERLAP_CACHE_SHARE))
