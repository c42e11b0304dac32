"""The learning rate over a run: a function of the step alone, so that nothing about it needs to be saved."""

from __future__ import annotations

import math


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
    """The multiple of the base rate at optimizer step 1, 2, ...; `min_factor` is reached right after `max_steps`.

    `wsd` decays over the last `decay_steps`, or that fraction of all steps; the others from the end of the warmup on,
    and `cosine_with_restarts` so many `cycles` times, each from the full rate.
    """
    done = step - 1
    if done < warmup_steps:
        return step / warmup_steps
    start = warmup_steps
    if kind == "wsd":
        # A warmup that reaches into the decay shortens it: a short trial of a long run is no reason to stop.
        start = max(start, max_steps - (decay_steps or round(decay_fraction * max_steps)))
    passed, length = max(0, done - start), max(1, max_steps - start)
    if kind == "cosine_with_restarts" and passed < length:
        passed = cycles * passed % length  # whole numbers: a cycle begins at its very step
    progress = min(1.0, passed / length)
    return 1.0 - (1.0 - min_factor) * _fallen(decay_shape if kind == "wsd" else kind, progress)


def _fallen(shape: str, progress: float) -> float:
    """From 0 at progress 0 to 1 at progress 1, but for `constant`."""
    if shape == "constant":
        return 0.0
    if shape == "linear":
        return progress
    if shape in ("cosine", "cosine_with_restarts"):
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    if shape == "sqrt":
        return math.sqrt(progress)
    raise ValueError(f"unknown schedule {shape!r}; known: constant, linear, cosine, cosine_with_restarts, wsd")
