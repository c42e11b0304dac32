"""Memory budget of a device that a run's trainer and its engines share.

Either side may start first, so free memory at one moment says little; each side computes what the other will take.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
ALTERNATE_CACHE_SHARE, OVERLAP_CACHE_SHARE = 0.65, 0.3
"""Share of the remaining GPU memory for KV caches. Alternating with a trainer, whose activations mostly fit into the
rest, and otherwise into the released cache; and overlapping with a trainer that computes at the same time."""
MAX_SHARE_FOR_MERGING = 0.8
"""Of the free host memory, for merging adapters; the rest is for everything that grows later."""
MIN_ENGINE_OVERHEAD_BYTES, ENGINE_OVERHEAD_DIVISOR = 2 * GIB + GIB // 4, 16
"""Memory of an engine besides weights and KV cache: at least so many bytes, and one in so many bytes of a GPU."""


@dataclass(frozen=True)
class ColocatedTrainer:
    """The trainer on an engine's device."""

    lock_directory: Path | None
    """Directory of the device lock; None if trainer and engines compute at the same time."""
    bytes_per_parameter: float
    """What the trainer keeps on the device per model parameter, without activations; between steps if alternating."""
    servers: int = 1
    """Engines on the device."""


@dataclass(frozen=True)
class ColocatedEngines:
    """The engines on a trainer's device."""

    alternates: bool
    """Whether engines are paused during a step and release their KV caches if the trainer is short of memory."""
    trainer_bytes_per_parameter: float
    """What the trainer keeps during a step per model parameter, without activations."""
    servers: int = 1
    share: float | None = None
    """Share of the device that each engine reserves (vLLM); None: what it needs."""
    cache_bytes: int | None = None
    """Size of each engine's KV cache; None: chosen by what is left."""

    def reserved_bytes(self, parameters: int, total: int) -> int:
        """Estimate the bytes that the engines keep during a step, of `total` on the GPU."""
        if self.share is not None:
            return int(self.servers * self.share * total)
        own = self.servers * (2 * parameters + max(MIN_ENGINE_OVERHEAD_BYTES, total // ENGINE_OVERHEAD_DIVISOR))
        if self.alternates:
            return own
        if self.cache_bytes is not None:
            return own + self.servers * self.cache_bytes
        return own + int(OVERLAP_CACHE_SHARE * max(0, total - own - self.trainer_bytes_per_parameter * parameters))


def keeps_base_in_memory(size: int, free: int) -> bool:
    """Whether an engine keeps the `size` bytes of its base model in host memory to merge adapters with.

    A merged version may need as much again. Otherwise tensors are read and merged one by one while the engine pauses.
    """
    return 2 * size <= MAX_SHARE_FOR_MERGING * free
