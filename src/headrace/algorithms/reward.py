"""Reward: a rollout's credit is its own reward, A_i = r_i. REINFORCE, without a baseline and without siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.algorithms.base import Algorithm, RolloutView


class Reward(Algorithm):
    async def score_rollout(self, rollout: RolloutView) -> None:
        if not math.isnan(rollout.reward):
            rollout.assign_advantages(rollout.reward)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout in group:  # an environment that scores groups gives the reward only now
            rollout.assign_advantages(rollout.reward)
