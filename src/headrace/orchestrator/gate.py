"""Which credited groups are worth training on: the gate that ships, and the base of your own.

A gate sees a group right after its credit, before the filters. What it rejects takes no slot in a batch, is counted as
`gated`, and the source draws another task instead; the curriculum's sampler observes it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import RolloutView

GATED = "gated"
"""The reason of a rollout whose group a gate has rejected."""


class Gate:
    """Base of all gates, constructed with the `kwargs` of its section.

    It decides by the group alone: what it remembers from group to group would be lost when the run is resumed.
    """

    def keeps(self, group: Sequence[RolloutView]) -> bool:
        """Whether to train on these, the trainable rollouts of a group that did not fail; there is at least one."""
        raise NotImplementedError(f"{type(self).__name__} has no keeps")


class AdvantageRange(Gate):
    """Rejects a group in which the advantage of every trainable token lies between two numbers, both included.

    Groups whose algorithm gives no advantages before the batch pass.
    """

    def __init__(self, reject_min: float, reject_max: float) -> None:
        self._least, self._most = np.float32(reject_min), np.float32(reject_max)  # as advantages are kept

    def keeps(self, group: Sequence[RolloutView]) -> bool:
        samples = [sample for rollout in group for sample in rollout.samples if "advantages" in sample.streams]
        credit = [sample.streams["advantages"][sample.mask] for sample in samples]
        if not any(len(values) for values in credit):
            return True
        return any(bool(((values < self._least) | (values > self._most)).any()) for values in credit)
