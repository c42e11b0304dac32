"""GRPO: a rollout's credit is its reward minus the mean reward of its group.

    A_i = r_i - mean(r)                      by default
    A_i = (r_i - mean(r)) / (std(r) + 1e-6)  normalize = "std"

A mean over tokens, length penalties and terms of your own: see `headrace.algorithms.group_credit`.

Left out on purpose: division by the standard deviation by default (it weighs nearly solved and nearly hopeless prompts
up), and any term of the loss: clipping and KL are the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, assign
from headrace.algorithms.group_credit import GroupCredit, GroupCreditConfig
from headrace.config.algorithms import ALGORITHMS


@ALGORITHMS.register
class GrpoConfig(GroupCreditConfig):
    """Reward minus the group's mean."""

    CREDIT = '`r_i - mean(r)`; with `normalize = "std"`, over `std(r) + 1e-6`'

    type: Literal["grpo"] = "grpo"

    def make(self, context: MakeContext) -> Grpo:
        return Grpo(self.make_credit(context))


class Grpo(Algorithm):
    def __init__(self, credit: GroupCredit | None = None) -> None:
        self._credit = credit or GroupCredit()

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        return self._credit.terms(group, self.tally)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        assign(group, self._credit.advantages(group, self.tally))
