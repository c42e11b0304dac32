"""Rewards and token counts of the rollouts of one group.

A tool response in the first prompt of a later sample (because the chat format rewrote history) counts as context but
not as tool tokens: it may have been counted in the earlier sample already.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.rollout.merge import observed_roles
from headrace.rollout.types import ROLES, Rollout

_TOOL = ROLES.index("tool")


class Cohort(msgspec.Struct, frozen=True, eq=False):
    """One group: float64 arrays with one value per rollout."""

    rewards: np.ndarray
    output_tokens: np.ndarray
    """Tokens that the model sampled, over all turns."""
    context_tokens: np.ndarray
    """All other tokens of the samples: first prompts and observations."""
    tool_tokens: np.ndarray
    """Tokens of tool responses; of all observations if the renderer does not report roles."""
    turns: np.ndarray

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Cohort:
        return cls(
            np.array([rollout.reward for rollout in rollouts], np.float64),
            np.array([rollout.completion_tokens for rollout in rollouts], np.float64),
            np.array([sum(np.count_nonzero(~s.mask) for s in rollout.samples) for rollout in rollouts], np.float64),
            np.array([_tool_tokens(rollout) for rollout in rollouts], np.float64),
            np.array([len(rollout.turns) for rollout in rollouts], np.float64),
        )

    @property
    def pass_rate(self) -> float:
        return float(self.rewards.mean())


def _tool_tokens(rollout: Rollout) -> int:
    count = 0
    for sample in rollout.samples:
        roles = observed_roles(sample, rollout.turns)
        if roles is None:
            count += sum(length for _, _, _, length in sample.obs_spans)
        else:
            count += int(np.count_nonzero(roles == _TOOL))
    return count
