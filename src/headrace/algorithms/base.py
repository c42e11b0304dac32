"""What an algorithm is: one mapping from finished rollouts to per-token credit.

It is configured per environment and constructed once for it. The orchestrator calls its hooks; it never touches
scheduling, packing or the training loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.rollout.types import Rollout


class RolloutView:
    """A rollout as an algorithm may see it: read everything, write only credit."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    @property
    def reward(self) -> float:
        return self.rollout.reward

    @property
    def group_id(self) -> str:
        return self.rollout.group_id

    @property
    def completion_tokens(self) -> int:
        return sum(sample.completion_length for sample in self.rollout.samples)

    def assign_advantages(self, credit: float | Sequence[float] | np.ndarray) -> None:
        """A scalar for every completion token, or one value each, the rollout's samples end to end."""
        if isinstance(credit, (int, float)):
            values = np.full(self.completion_tokens, float(credit))
        else:
            values = np.asarray(credit, np.float64)
        if values.shape != (self.completion_tokens,):
            raise ValueError(
                f"{values.size} advantages for {self.completion_tokens} completion tokens of task "
                f"{self.rollout.task_key}: give a scalar, or one value per completion token"
            )
        start = 0
        for sample in self.rollout.samples:
            end = start + sample.completion_length
            sample.set_stream("advantages", np.concatenate([np.zeros(sample.prompt_length), values[start:end]]))
            start = end


class Algorithm:
    """Base of all algorithms: override the hooks of the stages where credit is known.

    One that learns from group to group (a running baseline, say) changes its state in `score_group` alone, and gives
    and takes it as JSON: it is committed with the credit that changed it, and survives every restart.
    """

    async def score_rollout(self, rollout: RolloutView) -> None:
        """On arrival, without siblings."""

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        """The surviving rollouts of one group, before filters."""

    async def score_batch(self, batch: Sequence[RolloutView]) -> None:
        """What will be shipped, after filters: the stage for calls to other models."""

    def state(self) -> Any:
        """What it has learned, as JSON; None for an algorithm that keeps nothing."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from a state that `state` once gave."""
        raise NotImplementedError(f"{type(self).__name__} has a state in the journal but no load_state to take it")
