"""Efficiency bonus: correct rollouts that are cheaper than the mean of the correct earn more.

    term = r * clamp(1 - cost / mean_correct_cost, 0, 1) for the correct, 0 for the others

The cost is counted in tokens or in turns. Correct are the rollouts with the group's largest reward.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Tally
from headrace.algorithms.length_penalties import LENGTH_PENALTIES, LengthPenaltyConfig
from headrace.rollout.credit import Cohort


@LENGTH_PENALTIES.register
class TokensPenaltyConfig(LengthPenaltyConfig):
    """Correct rollouts cheaper than the average correct one earn up to twice their reward; cost in tokens."""

    OWN_BASELINE = True
    SHIFT_REASON = "the tokens penalty multiplies rewards"

    type: Literal["tokens"] = "tokens"
    completion_weight: float = Field(1.0, ge=0)
    """The cost of a token that the model wrote."""
    tool_response_weight: float = Field(1.0, ge=0)
    """The cost of a token of a tool's response."""

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        cost = self.completion_weight * cohort.output_tokens + self.tool_response_weight * cohort.tool_tokens
        return efficiency_bonus(cohort.rewards, cost)


@LENGTH_PENALTIES.register
class TurnsPenaltyConfig(LengthPenaltyConfig):
    """As `tokens`; cost in turns."""

    OWN_BASELINE = True
    SHIFT_REASON = "the turns penalty multiplies rewards"

    type: Literal["turns"] = "turns"

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        return efficiency_bonus(cohort.rewards, cohort.turns)


def efficiency_bonus(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return one bonus per rollout; 0 for all where the largest reward or the mean cost is not positive."""
    best = rewards.max()
    correct = rewards == best
    mean_cost = cost[correct].mean()
    if best <= 0 or mean_cost <= 0:
        return np.zeros_like(rewards)
    return np.where(correct, rewards * np.clip(1 - cost / mean_cost, 0.0, 1.0), 0.0)
