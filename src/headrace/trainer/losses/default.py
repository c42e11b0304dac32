"""The default loss: DPPO's binary mask on the probability difference, plus a squared log-ratio of all tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import LossInputs, LossOutputs, masked_mean, masked_ratio_loss, probability_difference


@LOSSES.register
class DefaultLossConfig(LossConfig):
    """DPPO's binary mask on the probability difference, plus a squared log-ratio."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(0.2, ge=0)
    """A token without positive advantage is masked once its probability fell by more than this."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """A token with positive advantage is masked once its probability rose by more than this."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantages."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio to the policy that sampled."""

    def compute(self, inputs: LossInputs) -> LossOutputs:
        difference = probability_difference(inputs)
        positive = inputs.advantages > 0
        too_high = positive & (difference > self.dppo_mask_high)
        too_low = ~positive & (difference < -self.dppo_mask_low)
        masked = too_high | too_low
        outputs = masked_ratio_loss(inputs, self.adv_tau * inputs.advantages, masked, self.kl_tau)
        members = inputs.loss_mask
        outputs.metrics["is_masked_low"] = masked_mean(too_low, members)
        outputs.metrics["is_masked_high"] = masked_mean(too_high, members)
        outputs.metrics["masked_advantage_positive"] = masked_mean(positive, members & masked)
        outputs.metrics["masked_advantage_negative"] = masked_mean(inputs.advantages < 0, members & masked)
        return outputs
