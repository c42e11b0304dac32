"""CISPO: REINFORCE with a truncated importance weight; unlike with a clipped ratio, no token loses its gradient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import (
    LossInputs,
    LossOutputs,
    log_ratios,
    masked_mean,
    mismatch_kl,
    of_members,
    weighted_sum,
)


@LOSSES.register
class CispoLossConfig(LossConfig):
    """REINFORCE with an importance weight of at most `eps_max`."""

    type: Literal["cispo"] = "cispo"
    eps_max: float = Field(5.0, gt=0)
    """The largest importance weight."""

    def compute(self, inputs: LossInputs) -> LossOutputs:
        ratio = log_ratios(inputs).detach().exp()
        capped = ratio > self.eps_max
        per_token = -ratio.clamp(max=self.eps_max) * inputs.advantages * of_members(inputs.trainer_logprobs, inputs)
        metrics = {"mismatch_kl": mismatch_kl(inputs), "is_clipped": masked_mean(capped, inputs.loss_mask)}
        return LossOutputs(weighted_sum(per_token, inputs), metrics, capped)
