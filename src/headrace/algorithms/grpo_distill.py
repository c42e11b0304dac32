"""GRPO and distillation in one batch: the reward's credit and a frozen teacher, on the same tokens.

    loss = rl_weight * rl(A) + ref_kl_weight * ref_kl        each a mean over its own tokens

A is the credit of `headrace.algorithms.group_credit`, as in grpo; ref_kl learns from the teacher's logprobs of the
sample's own tokens, as in opd. Gradients add. A rollout whose advantage is 0 (its whole group has the same reward)
learns only from the teacher. A rollout that the teacher did not score is dropped, as in opd: every rollout of a batch
is trained with the same objective.

Left out on purpose: a schedule of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from headrace.algorithms.base import CreditTerm, MakeContext, RolloutView, Survivor
from headrace.algorithms.group_credit import GroupCredit, GroupCreditConfig
from headrace.algorithms.teacher import FrozenTeacherConfig, TaughtAlgorithm
from headrace.config.algorithms import ALGORITHMS
from headrace.inference.client.reference import Reference


@ALGORITHMS.register
class GrpoDistillConfig(FrozenTeacherConfig, GroupCreditConfig):
    """GRPO and distillation from a frozen teacher on the same samples."""

    LOSS = "rl and ref_kl"
    CREDIT = "as `grpo`; and towards a frozen teacher, as `opd`, each with its weight"

    type: Literal["grpo_distill"] = "grpo_distill"
    rl_weight: float = Field(1.0, gt=0)
    """Weight of the rl loss."""
    ref_kl_weight: float = Field(1.0, gt=0)
    """Weight of the distillation loss."""

    def make(self, context: MakeContext) -> GrpoDistill:
        teacher, credit = context.reference(self.teacher), self.make_credit(context)
        return GrpoDistill(teacher, credit, self.rl_weight, self.ref_kl_weight, self.max_concurrent)


class GrpoDistill(TaughtAlgorithm):
    def __init__(
        self,
        teacher: Reference | None,
        credit: GroupCredit | None = None,
        rl_weight: float = 1.0,
        ref_kl_weight: float = 1.0,
        max_concurrent: int = 32,
    ) -> None:
        super().__init__(teacher, max_concurrent)
        self._credit = credit or GroupCredit()
        self._rl_weight = rl_weight
        self._ref_kl_weight = ref_kl_weight

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        return self._credit.terms(group, self.tally)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout, advantage in zip(group, self._credit.advantages(group, self.tally), strict=True):
            rollout.assign_advantages(float(advantage))
            # With an advantage of 0, its tokens would only count in the mean of the rl loss.
            weight = self._rl_weight if advantage else 0.0
            for sample in rollout.samples:
                if weight != 1:
                    sample.set_stream("rl_weights", sample.mask * weight)
                sample.set_stream("ref_kl_weights", sample.mask * self._ref_kl_weight)

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await self.distil(batch)
