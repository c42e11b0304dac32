"""IcePop: drops the tokens on which trainer and engine disagree too much, in either direction."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.config.trainer import LOSSES, LossConfig
from headrace.errors import InvalidValue
from headrace.trainer.loss import LossInputs, LossOutputs, log_ratios, masked_mean, masked_ratio_loss


@LOSSES.register
class IcepopLossConfig(LossConfig):
    """Only tokens whose ratio is between `alpha` and `beta`."""

    type: Literal["icepop"] = "icepop"
    alpha: float = Field(0.5, ge=0)
    """The smallest ratio with which a token is trained."""
    beta: float = Field(5.0, gt=0)
    """The largest ratio with which a token is trained."""

    @model_validator(mode="after")
    def _some_ratio_is_kept(self) -> IcepopLossConfig:
        if self.alpha > self.beta:
            raise InvalidValue(
                f"above beta, which is {self.beta:g}: no token would be trained",
                key="alpha",
                value=self.alpha,
                fix="Lower alpha, or raise beta.",
            )
        return self

    def compute(self, inputs: LossInputs) -> LossOutputs:
        ratio = log_ratios(inputs).detach().exp()
        too_low, too_high = ratio < self.alpha, ratio > self.beta
        outputs = masked_ratio_loss(inputs, inputs.advantages, too_low | too_high, kl_tau=0.0)
        outputs.metrics["is_masked_low"] = masked_mean(too_low, inputs.loss_mask)
        outputs.metrics["is_masked_high"] = masked_mean(too_high, inputs.loss_mask)
        return outputs
