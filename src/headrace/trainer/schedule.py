"""Learning-rate schedules: functions of the step alone, so that they have no state to save."""

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
    """Return the factor of the base rate at optimizer step 1, 2, ...; `min_factor` is reached right after `max_steps`.

    `wsd` decays over the last `decay_steps`, or `decay_fraction` of all steps; the others from the end of the warmup
    on, `cosine_with_restarts` in `cycles` cycles, each from the full rate.
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
    if shape == "constant":
        decay = 0.0
    elif shape == "linear":
        decay = progress
    elif shape in ("cosine", "cosine_with_restarts"):
        decay = 0.5 * (1.0 - math.cos(math.pi * progress))
    elif shape == "sqrt":
        decay = math.sqrt(progress)
    else:
        raise ValueError(f"unknown schedule {shape!r}; known: constant, linear, cosine, cosine_with_restarts, wsd")
    return 1.0 - (1.0 - min_factor) * decay
