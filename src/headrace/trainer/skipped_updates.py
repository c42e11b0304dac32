"""How many updates in a row were skipped because their gradients were not finite, and whether that is too many.

One that is skipped now and then costs only itself. Where every one is, the model or its loss is broken, and a run that
goes on spends its data for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ADVICE = (
    "If the loss grew before them, try a smaller optim.lr, more scheduler.warmup_steps or a smaller "
    'optim.max_grad_norm; else model.dtype = "float32", and look for a division by 0, the logarithm of 0 or an '
    "overflow in what is your own: a loss, an advantage"
)


class SkippedUpdates:
    """`most` of them in a row end a run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._before = "nothing was learned before"

    @property
    def in_a_row(self) -> int:
        return len(self._norms)

    def look(self, step: int, grad_norm: float, loss: float) -> str | None:
        """Take note of a step. Returns why the run cannot go on, or None if it can."""
        if math.isfinite(grad_norm):
            self._norms.clear()
            self._losses.clear()
            self._before = f"at step {step}, the last that changed anything, they were {grad_norm:.4g} and {loss:.4g}"
            return None
        self._norms.append(grad_norm)
        self._losses.append(loss)
        if self.in_a_row < self._most:
            return None
        steps = f"step {step}" if self.in_a_row == 1 else f"steps {step - self.in_a_row + 1} to {step}"
        return (
            f"the gradients of {steps} were not finite, so that nothing was learned: with max_skipped_updates = "
            f"{self._most} that ends the run. Their norms were {_listed(self._norms)}, the losses "
            f"{_listed(self._losses)}; {self._before}. {ADVICE}; a higher max_skipped_updates goes past them"
        )


def _listed(values: Sequence[float]) -> str:
    """Each number once; of many, the first and the last."""
    words = list(dict.fromkeys(f"{value:.4g}" for value in values))
    return ", ".join(words) if len(words) <= 4 else f"{words[0]}, {words[1]}, ..., {words[-1]}"
