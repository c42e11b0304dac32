"""`[trainer.loss]`: the base of the losses in `headrace.trainer.losses`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.config.registry import Alternative, Registry

LOSSES: Registry[LossConfig] = Registry("loss", default="default")


class LossConfig(Alternative):
    """What is minimized over the tokens that have advantages."""

    REGISTRY = LOSSES

    type: str

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.type

    def make(self) -> Callable[..., Any]:
        """Return the loss: a function from `PackedInputs` to `LossOutputs` of `headrace.trainer.loss`."""
        return self.compute

    def compute(self, inputs: Any) -> Any:
        """Return the loss and its metrics for the tokens of several whole sequences."""
        raise NotImplementedError
