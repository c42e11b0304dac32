"""IPO: the default loss with a symmetric mask."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import LossInputs, LossOutputs, masked_ratio_loss, probability_difference


@LOSSES.register
class IpoLossConfig(LossConfig):
    """The default loss with a symmetric mask."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(0.1, ge=0)
    """Tokens whose probability moved by more than this are masked."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantages."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio to the policy that sampled."""

    def compute(self, inputs: LossInputs) -> LossOutputs:
        masked = probability_difference(inputs).abs() > self.ipo_threshold
        return masked_ratio_loss(inputs, self.adv_tau * inputs.advantages, masked, self.kl_tau)
