"""Curriculum gates: which credited groups are trained on, and the base class for custom gates.

A gate is called with a group right after its credit, before the filters. A rejected group takes no slot in a batch, is
counted as `gated`, and is replaced by another draw; the curriculum's sampler still observes its rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import RolloutView
from headrace.config.environments import GATES, GateConfig
from headrace.errors import InvalidValue
from headrace.imports import load_class

GATED = "gated"
"""Drop reason of rollouts whose group was rejected by a gate."""


class Gate:
    """Base class of all gates, constructed with the `kwargs` of its section.

    Decide from the group alone: state kept between groups is lost when the run is resumed.
    """

    def keeps(self, group: Sequence[RolloutView]) -> bool:
        """Return whether to train on a group, given its trainable rollouts that did not fail (at least one)."""
        raise NotImplementedError(f"{type(self).__name__} has no keeps")


@GATES.register
class NoGateConfig(GateConfig):
    """Every group passes."""

    type: Literal["none"] = "none"

    def make(self) -> None:
        return None


@GATES.register
class AdvantageRangeConfig(GateConfig):
    """Rejects a group in which every trainable advantage is in `[reject_min, reject_max]`."""

    READS_ADVANTAGES = True

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: float = 0.0
    """Lower end of the rejected range, included."""
    reject_max: float = 0.0
    """Upper end of the rejected range, included."""

    def make(self) -> AdvantageRange:
        return AdvantageRange(self.reject_min, self.reject_max)

    def problems(self) -> Iterator[InvalidValue]:
        if self.reject_min > self.reject_max:
            fact = f"above reject_max, which is {self.reject_max:g}: nothing would be rejected"
            yield self.invalid("reject_min", fact, "Lower reject_min, or raise reject_max.")


@GATES.register
class ImportedGateConfig(GateConfig):
    """A gate of your own: a subclass of `headrace.orchestrator.gate.Gate`."""

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""

    def make(self) -> Gate:
        return self._load()(**self.kwargs)

    def check_imports(self) -> None:
        self._load()

    def _load(self) -> Callable[..., Gate]:
        return load_class(self.type, Gate, (), self.kwargs, "gate.type")


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
