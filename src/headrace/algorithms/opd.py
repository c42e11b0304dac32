"""On-policy distillation: the policy learns from a frozen teacher on its own samples.

    ref_t = log p_teacher(token_t | all before it)        KL(policy || teacher), estimated on the policy's own tokens

The teacher scores the sample's own tokens at the temperature that they were sampled at. Rewards are logged and not
used. A rollout that the teacher did not score is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.algorithms.base import MakeContext, Survivor
from headrace.algorithms.teacher import DistillationConfig, FrozenTeacherConfig, TaughtAlgorithm
from headrace.config.algorithms import ALGORITHMS


@ALGORITHMS.register
class OpdConfig(FrozenTeacherConfig, DistillationConfig):
    """On-policy distillation: towards a frozen teacher on the policy's own samples."""

    LOSS = "ref_kl"
    CREDIT = "none: towards a frozen teacher, on the policy's own tokens"

    type: Literal["opd"] = "opd"

    def make(self, context: MakeContext) -> Opd:
        return Opd(context.reference(self.teacher), self.max_concurrent)


class Opd(TaughtAlgorithm):
    action_loss_type = "ref_kl"

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await self.distil(batch)
