"""A group in numbers: what its rollouts earned, and what they cost.

A tool's response that stands in the first prompt of a later sample, because the chat format rewrote history, counts as
context but not as a tool's tokens: nobody can tell whether it was counted before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.rollout.observations import observed_roles
from headrace.rollout.types import ROLES, Rollout, Sample

_TOOL = ROLES.index("tool")


class Cohort(msgspec.Struct, frozen=True, eq=False):
    """float64 arrays over the rollouts of one group."""

    rewards: np.ndarray
    output_tokens: np.ndarray
    """What the model sampled, over all turns."""
    context_tokens: np.ndarray
    """What its samples hold besides: first prompts and observations."""
    tool_tokens: np.ndarray
    """What tools answered; all observations where the renderer could not tell who wrote them."""
    turns: np.ndarray

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Cohort:
        return cls(
            np.array([rollout.reward for rollout in rollouts], np.float64),
            np.array([rollout.completion_tokens for rollout in rollouts], np.float64),
            np.array([sum(map(_given, rollout.samples)) for rollout in rollouts], np.float64),
            np.array([_from_tools(rollout) for rollout in rollouts], np.float64),
            np.array([len(rollout.turns) for rollout in rollouts], np.float64),
        )

    @property
    def pass_rate(self) -> float:
        return float(self.rewards.mean())


def _given(sample: Sample) -> int:
    return int(np.count_nonzero(~sample.mask))


def _from_tools(rollout: Rollout) -> int:
    count = 0
    for sample in rollout.samples:
        roles = observed_roles(sample, rollout.turns)
        if roles is None:
            count += sum(length for _, _, _, length in sample.obs_spans)
        else:
            count += int(np.count_nonzero(roles == _TOOL))
    return count
