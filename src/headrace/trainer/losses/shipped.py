"""The losses of the rl component that ship; `headrace.trainer.loss` has the formulas and what they share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.config.trainer import LOSSES, LossConfig
from headrace.errors import InvalidValue
from headrace.trainer.loss import (
    LossInputs,
    LossOutputs,
    PackedInputs,
    clipped_ratio_loss,
    log_ratios,
    masked_mean,
    masked_ratio_loss,
    mean_of_sequence,
    mismatch_kl,
    probability_difference,
    weighted_sum,
    zero_others,
)


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
            fact = f"above beta, which is {self.beta:g}: no token would be trained"
            raise InvalidValue(fact, key="alpha", value=self.alpha, fix="Lower alpha, or raise beta.")
        return self

    def compute(self, inputs: LossInputs) -> LossOutputs:
        ratio = log_ratios(inputs).detach().exp()
        too_low, too_high = ratio < self.alpha, ratio > self.beta
        outputs = masked_ratio_loss(inputs, inputs.advantages, too_low | too_high, kl_tau=0.0)
        outputs.metrics["is_masked_low"] = masked_mean(too_low, inputs.loss_mask)
        outputs.metrics["is_masked_high"] = masked_mean(too_high, inputs.loss_mask)
        return outputs


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


@LOSSES.register
class CispoLossConfig(LossConfig):
    """REINFORCE with an importance weight of at most `eps_max`."""

    type: Literal["cispo"] = "cispo"
    eps_max: float = Field(5.0, gt=0)
    """The largest importance weight."""

    def compute(self, inputs: LossInputs) -> LossOutputs:
        ratio = log_ratios(inputs).detach().exp()
        capped = ratio > self.eps_max
        per_token = -ratio.clamp(max=self.eps_max) * inputs.advantages * zero_others(inputs.trainer_logprobs, inputs)
        metrics = {"mismatch_kl": mismatch_kl(inputs), "is_clipped": masked_mean(capped, inputs.loss_mask)}
        return LossOutputs(weighted_sum(per_token, inputs), metrics, capped)


@LOSSES.register
class ReinforceLossConfig(LossConfig):
    """The plain policy gradient."""

    type: Literal["reinforce"] = "reinforce"

    def compute(self, inputs: LossInputs) -> LossOutputs:
        per_token = -inputs.advantages * zero_others(inputs.trainer_logprobs, inputs)
        return LossOutputs(weighted_sum(per_token, inputs), {"mismatch_kl": mismatch_kl(inputs)})
