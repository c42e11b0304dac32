"""Reward: a rollout's credit is its own reward, A_i = r_i. REINFORCE, without a baseline and without siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView
from headrace.config.algorithms import ALGORITHMS, FINAL, AdvantageConfig, Promises


@ALGORITHMS.register
class RewardAlgoConfig(AdvantageConfig):
    """The reward itself."""

    CREDIT = "`r_i`: REINFORCE without a baseline"

    type: Literal["reward"] = "reward"

    def make(self, context: MakeContext) -> Reward:
        return Reward()

    def promises(self, algorithm: Algorithm) -> Promises:
        itself = "credit is the reward itself"
        return Promises(frozenset({"order"}), {"shift": itself, "zero_sum": itself, "signs": FINAL})


class Reward(Algorithm):
    async def score_rollout(self, rollout: RolloutView) -> None:
        if not math.isnan(rollout.reward):
            rollout.assign_advantages(rollout.reward)

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        rewards = np.array([rollout.reward for rollout in group])
        return [CreditTerm("reward", rewards, 0.0, rewards, "reward")]

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout in group:  # an environment that scores groups gives the reward only now
            rollout.assign_advantages(rollout.reward)
