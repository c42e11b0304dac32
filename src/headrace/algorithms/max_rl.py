"""MaxRL: credit relative to how often the group succeeds (arXiv 2602.02710).

    A_i = (r_i - mean(r)) / mean(r),    0 for all where mean(r) <= 0

For rewards of 0 and 1 its expected gradient approaches, as the group grows, that of log P(success), where GRPO's is
that of P(success): a prompt that one rollout in a hundred solves counts a hundred times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, assign
from headrace.config.algorithms import ALGORITHMS, FINAL, AdvantageConfig, Promises
from headrace.rollout.credit import baseline, max_rl


@ALGORITHMS.register
class MaxRlConfig(AdvantageConfig):
    """Reward minus the group's mean, over the mean."""

    CREDIT = "`(r_i - mean(r)) / mean(r)`; 0 where the mean is not positive (arXiv 2602.02710)"
    COMPARES = True

    type: Literal["max_rl"] = "max_rl"

    def make(self, context: MakeContext) -> MaxRl:
        return MaxRl()

    def promises(self, algorithm: Algorithm) -> Promises:
        return Promises(frozenset({"zero_sum", "order"}), {"shift": "it divides by the mean reward", "signs": FINAL})


class MaxRl(Algorithm):
    async def score_group(self, group: Sequence[RolloutView]) -> None:
        assign(group, self.credit_terms(group)[0].values)

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        rewards = np.array([rollout.reward for rollout in group])
        formula = "(reward - mean(reward)) / mean(reward)"
        return [CreditTerm("reward", rewards, baseline(rewards), max_rl(rewards), formula)]
