"""Memory of an engine: its KV cache, how many requests it decodes together, and a device that the trainer shares.

Computed from sizes alone, without torch: by the engine when it has loaded its model, and by the plan before a run.
Either side of a shared device may start first, so free memory at one moment says little; each computes what the other
will take.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import BadInput
from headrace.inference.embedded.block_manager import BLOCK_SIZE, blocks_for
from headrace.inference.model_shape import ModelShape

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


GPU_CACHE_SHARE = 0.9
"""Share of the remaining memory for the KV cache on a GPU that the engine has to itself."""
CPU_CACHE_SHARE = 1 / 8
"""Share of the free memory on a CPU, where the KV window may take up to twice as much again."""
CONTEXT_BYTES = 600 << 20
"""Approximate memory of a process on a GPU outside of torch's allocator: its context, and libraries."""
MIN_WORKING_BYTES, WORKING_SHARE = 3 << 29, 0.04
"""Memory for the engine's graphs, logits and activations: at least so much, or that share of the GPU."""

MIN_RUNNING, MAX_RUNNING = 256, 1024
"""Requests that are decoded together on a GPU, unless configured. More than 1024 make single requests slow, and the
start, which captures CUDA graphs for all sizes, too."""
MIN_GAIN = 1.15
"""By how much twice as many requests must raise the tokens per second."""
LAYER_S = 1e-4
"""Seconds of a layer in a decode step that do not depend on its size: launches and latencies. Measured on an H200."""
GPU_BYTES_PER_S, GPU_FLOPS_PER_S = 4.8e12, 0.8e15
"""Of an H200. Other GPUs have about the same ratio of the two."""


def working_bytes(total: int) -> int:
    """Return the bytes for graphs, logits and activations of an engine on a GPU with `total` bytes."""
    return max(MIN_WORKING_BYTES, int(WORKING_SHARE * total))


def cache_budget(free: int, total: int, own: int, parameters: int, shared: ColocatedTrainer | None) -> int:
    """Return the bytes for the KV cache on a GPU with `total` bytes, of which this process uses `own`.

    Memory for the trainer and for other servers is set aside, whether they have started or not.
    """
    working = working_bytes(total)
    if shared is None:
        return max(0, int((free - working) * GPU_CACHE_SHARE))
    trainer = int(parameters * shared.bytes_per_parameter)
    left = min(free - working, (total - trainer) // shared.servers - own - working)
    if left <= 0:
        raise BadInput(
            f"one GPU of {total / 2**30:.1f} GiB is too small for this model: its trainer needs about "
            f"{trainer / 2**30:.1f} GiB, and the engine uses {own / 2**30:.1f} GiB",
            fix="Train an adapter ([trainer.lora]), keep the optimizer's state in CPU memory "
            "(trainer.optim.offload_state), or take a smaller model; inference.kv_cache_gb overrides this estimate.",
        )
    return int(left * (ALTERNATE_CACHE_SHARE if shared.lock_directory is not None else OVERLAP_CACHE_SHARE))


def blocks_within(memory: int, token_bytes: int, longest: int, max_running: int) -> int:
    """Return the blocks of a KV cache for `max_running` requests of `longest` tokens, but at most `memory` bytes."""
    size = BLOCK_SIZE * token_bytes
    needed, affordable = blocks_for(longest), int(memory / size)
    if affordable < needed:
        fact = f"a request of this length needs {needed * size / 1e9:.2g} GB of KV cache, but has {memory / 1e9:.2g} GB"
        fix = "Lower it, or raise inference.kv_cache_gb."
        raise BadInput(fact, key="inference.max_model_len", value=longest, fix=fix)
    return min(affordable, max_running * needed)


def choose_max_running(shape: ModelShape, memory: int, longest: int, in_flight: int | None = None) -> int:
    """Return how many requests a GPU decodes together: a power of two.

    It grows from `MIN_RUNNING` to `MAX_RUNNING` as long as twice as many requests are a gain, `memory` bytes of KV
    cache hold them at half of the `longest` length, and up to `in_flight` requests (None: any number) come at once.
    """
    running = MIN_RUNNING
    length = max(1, longest // 2)
    while running < MAX_RUNNING:
        twice = 2 * running
        gain = 2 * decode_step_s(shape, running, length) / decode_step_s(shape, twice, length)
        fits = twice * length * shape.kv_bytes(2) <= memory
        if gain < MIN_GAIN or not fits or (in_flight is not None and in_flight <= running):
            break
        running = twice
    return running


def decode_step_s(shape: ModelShape, running: int, length: int) -> float:
    """Estimate the seconds of a decode step of `running` requests with `length` tokens each, in bfloat16.

    Weights are read once or, with many requests, multiplied for longer than they are read; keys and values are read by
    each request.
    """
    weights = max(2 * shape.parameters / GPU_BYTES_PER_S, 2 * shape.parameters * running / GPU_FLOPS_PER_S)
    cache = running * length * shape.kv_bytes(2) / GPU_BYTES_PER_S
    return shape.sizes.num_hidden_layers * LAYER_S + weights + cache
