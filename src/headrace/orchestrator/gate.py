"""Curriculum gates: which credited groups are trained on, and the base class for custom gates.

A gate is called with a group right after its credit, before the filters. A rejected group takes no slot in a batch, is
counted as `gated`, and is replaced by another draw; the curriculum's sampler still observes its rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import RolloutView

GATED = "gated"
"""Drop reason of rollouts whose group was rejected by a gate."""


class Gate:
    """Base class of all gates, constructed with the `kwargs` of its section.

    Decide from the group alone: state kept between groups is lost when the run is resumed.
    """

    def keeps(self, group: Sequence[RolloutView]) -> bool:
        """Return whether to train on a group, given its trainable rollouts that did not fail (at least one)."""
        raise NotImplementedError(f"{type(self).__name__} has no keeps")


class AdvantageRange(Gate):
    """Rejects groups in which the advantages of all trainable tokens are in [reject_min, reject_max].

    Groups whose algorithm assigns no advantages before the batch pass.
    """

    def __init__(self, reject_min: float, reject_max: float) -> None:
        self._least, self._most = np.float32(reject_min), np.float32(reject_max)  # dtype of advantages

    def keeps(self, group: Sequence[RolloutView]) -> bool:
        samples = [sample for rollout in group for sample in rollout.samples if "advantages" in sample.streams]
        credit = [sample.streams["advantages"][sample.mask] for sample in samples]
        if not any(len(values) for values in credit):
            return True
        return any(bool(((values < self._least) | (values > self._most)).any()) for values in credit)
