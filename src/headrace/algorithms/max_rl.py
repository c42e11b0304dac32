"""MaxRL: credit relative to how often the group succeeds (arXiv 2602.02710).

    A_i = (r_i - mean(r)) / mean(r),    0 for all where mean(r) <= 0

For rewards of 0 and 1 its expected gradient approaches, as the group grows, that of log P(success), where GRPO's is
that of P(success): a prompt that one rollout in a hundred solves counts a hundred times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.rollout.credit import max_rl


class MaxRl(Algorithm):
    async def score_group(self, group: Sequence[RolloutView]) -> None:
        advantages = max_rl(np.array([rollout.reward for rollout in group]))
        for rollout, advantage in zip(group, advantages, strict=True):
            rollout.assign_advantages(float(advantage))
