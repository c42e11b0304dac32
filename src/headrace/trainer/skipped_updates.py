"""Consecutive updates that were skipped because of gradients that are not finite, and whether they are too many.

A single skipped update is harmless. If every update is skipped, the model or its loss is broken, and the run must stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ADVICE = (
    "If the loss grew before them, try a smaller optim.lr, more scheduler.warmup_steps or a smaller "
    'optim.max_grad_norm; otherwise model.dtype = "float32", and look for a division by 0, the logarithm of 0 or an '
    "overflow in your own losses and advantages"
)


class SkippedUpdates:
    """Counts skipped updates in a row; `limit` of them end a run."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._before = "there was no earlier update"

    @property
    def in_a_row(self) -> int:
        return len(self._norms)

    def record(self, step: int, grad_norm: float, loss: float) -> str | None:
        """Record a step; return why the run must end, or None."""
        if math.isfinite(grad_norm):
            self._norms.clear()
            self._losses.clear()
            self._before = f"at step {step}, the last update, they were {grad_norm:.4g} and {loss:.4g}"
            return None
        self._norms.append(grad_norm)
        self._losses.append(loss)
        if self.in_a_row < self._limit:
            return None
        steps = f"step {step}" if self.in_a_row == 1 else f"steps {step - self.in_a_row + 1} to {step}"
        return (
            f"the gradients of {steps} were not finite, so their updates were skipped, and max_skipped_updates = "
            f"{self._limit} ends the run. Their norms were {_listed(self._norms)}, the losses "
            f"{_listed(self._losses)}; {self._before}. {ADVICE}. To continue anyway, raise max_skipped_updates"
        )


def _listed(values: Sequence[float]) -> str:
    """Format distinct values; of many, the first two and the last."""
    words = list(dict.fromkeys(f"{value:.4g}" for value in values))
    return ", ".join(words) if len(words) <= 4 else f"{words[0]}, {words[1]}, ..., {words[-1]}"
