"""A device that a run's trainer and its engines share, as each side knows the other: what it keeps of the memory.

Either may come up first, so what is free at a moment says little. Arithmetic alone: what there is, who asks measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
IN_TURNS, AT_ONCE = 0.65, 0.3
"""What KV caches get of what is left on a GPU: where a trainer takes turns with them, whose activations mostly fit into
the rest, and else into the cache; and where a trainer computes at the same time."""
ENGINE_LEAST, ENGINE_SHARE = 2 * GIB + GIB // 4, 16
"""What an engine has besides its weights and its cache, at least, and one in how many bytes of a GPU."""


@dataclass(frozen=True)
class TrainerBeside:
    """The trainer on an engine's device, which has `servers` engines."""

    turns: Path | None
    """The directory in which they say whose turn it is; None: all compute at once."""
    bytes_per_parameter: float
    """Of the model, what the trainer keeps there, activations aside: with turns between its steps."""
    servers: int = 1


@dataclass(frozen=True)
class EnginesBeside:
    """The `servers` engines on a trainer's device."""

    take_turns: bool
    """They stand still while it computes, and lend it the memory of their caches."""
    trainer_bytes_per_parameter: float
    """What it keeps for itself during a step, activations aside."""
    servers: int = 1
    share: float | None = None
    """Of the device, what each has for itself at all times (vLLM); None: what it needs."""
    cache_bytes: int | None = None
    """Of each one's KV cache; None: chosen by what is left."""

    def kept(self, parameters: int, total: int) -> int:
        """About the bytes that are theirs through a step, of a GPU with `total` and a model of so many parameters."""
        if self.share is not None:
            return int(self.servers * self.share * total)
        own = self.servers * (2 * parameters + max(ENGINE_LEAST, total // ENGINE_SHARE))
        if self.take_turns:
            return own
        if self.cache_bytes is not None:
            return own + self.servers * self.cache_bytes
        return own + int(AT_ONCE * max(0, total - own - self.trainer_bytes_per_parameter * parameters))
