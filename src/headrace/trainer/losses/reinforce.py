"""REINFORCE: the plain policy gradient, without a correction for the policy that sampled."""

from __future__ import annotations

from typing import Literal

from headrace.config.trainer import LOSSES, LossConfig
from headrace.trainer.loss import LossInputs, LossOutputs, mismatch_kl, of_members, weighted_sum


@LOSSES.register
class ReinforceLossConfig(LossConfig):
    """The plain policy gradient."""

    type: Literal["reinforce"] = "reinforce"

    def compute(self, inputs: LossInputs) -> LossOutputs:
        per_token = -inputs.advantages * of_members(inputs.trainer_logprobs, inputs)
        return LossOutputs(weighted_sum(per_token, inputs), {"mismatch_kl": mismatch_kl(inputs)})
