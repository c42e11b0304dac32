"""Efficiency bonus: correct rollouts that are cheaper than the mean of the correct earn more.

    term = r * clamp(1 - cost / mean_correct_cost, 0, 1) for the correct, 0 for the others

The cost is counted in tokens or in turns. Correct are the rollouts with the group's largest reward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
from pydantic import Field

from headrace.algorithms.length_penalty import LengthPenaltyDeclaration
from headrace.algorithms.tally import Tally
from headrace.config.algorithms import LENGTH_PENALTIES
from headrace.rollout.cohort import Cohort


@LENGTH_PENALTIES.register
class TokensPenaltyConfig(LengthPenaltyDeclaration):
    """Correct rollouts cheaper than the average correct one earn up to twice their reward; cost in tokens."""

    OWN_BASELINE = True
    SHIFT_REASON = "the tokens penalty multiplies rewards"

    type: Literal["tokens"] = "tokens"
    completion_weight: float = Field(1.0, ge=0)
    """The cost of a token that the model wrote."""
    tool_response_weight: float = Field(1.0, ge=0)
    """The cost of a token of a tool's response."""

    def make(self, seq_len: int) -> Efficiency:
        return Efficiency.in_tokens(self.completion_weight, self.tool_response_weight)


@LENGTH_PENALTIES.register
class TurnsPenaltyConfig(LengthPenaltyDeclaration):
    """As `tokens`; cost in turns."""

    OWN_BASELINE = True
    SHIFT_REASON = "the turns penalty multiplies rewards"

    type: Literal["turns"] = "turns"

    def make(self, seq_len: int) -> Efficiency:
        return Efficiency.in_turns()


class Efficiency(msgspec.Struct, frozen=True):
    cost: Callable[[Cohort], np.ndarray]
    plain_mean: bool = True

    @classmethod
    def in_tokens(cls, completion_weight: float = 1.0, tool_response_weight: float = 1.0) -> Efficiency:
        return cls(lambda cohort: completion_weight * cohort.output_tokens + tool_response_weight * cohort.tool_tokens)

    @classmethod
    def in_turns(cls) -> Efficiency:
        return cls(lambda cohort: cohort.turns)

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        return efficiency_bonus(cohort.rewards, self.cost(cohort))


def efficiency_bonus(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return one bonus per rollout; 0 for all where the largest reward or the mean cost is not positive."""
    best = rewards.max()
    correct = rewards == best
    mean_cost = cost[correct].mean()
    if best <= 0 or mean_cost <= 0:
        return np.zeros_like(rewards)
    return np.where(correct, rewards * np.clip(1 - cost / mean_cost, 0.0, 1.0), 0.0)
