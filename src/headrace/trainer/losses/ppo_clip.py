"""PPO's pessimistic clip of each token's ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import LossInputs, LossOutputs, clipped_ratio_loss, log_ratios


@LOSSES.register
class PpoClipLossConfig(LossConfig):
    """PPO's clip of each token's ratio; DAPO's clip-higher is 0.2 and 0.28."""

    type: Literal["ppo_clip"] = "ppo_clip"
    eps_low: float = Field(0.2, ge=0, le=1)
    """A ratio below 1 minus this is clipped."""
    eps_high: float = Field(0.2, ge=0)
    """A ratio above 1 plus this is clipped."""

    def compute(self, inputs: LossInputs) -> LossOutputs:
        return clipped_ratio_loss(inputs, log_ratios(inputs), self.eps_low, self.eps_high)
