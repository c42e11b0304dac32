"""GSPO: PPO's clip of one ratio per sequence, the geometric mean of its members' ratios."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import (
    LossOutputs,
    PackedInputs,
    clipped_ratio_loss,
    log_ratios,
    masked_mean,
    mean_of_sequence,
)


@LOSSES.register
class GspoLossConfig(LossConfig):
    """PPO's clip of one ratio per sequence."""

    type: Literal["gspo"] = "gspo"
    eps_low: float = Field(3e-4, ge=0, le=1)
    """A sequence's ratio below 1 minus this is clipped."""
    eps_high: float = Field(4e-4, ge=0)
    """A sequence's ratio above 1 plus this is clipped."""

    def compute(self, inputs: PackedInputs) -> LossOutputs:
        log_ratio = mean_of_sequence(log_ratios(inputs), inputs)
        outputs = clipped_ratio_loss(inputs, log_ratio, self.eps_low, self.eps_high)
        outputs.metrics["sequence_ratio"] = masked_mean(log_ratio.exp(), inputs.loss_mask)
        return outputs
