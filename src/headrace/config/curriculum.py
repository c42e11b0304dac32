"""`[orchestrator.train.curriculum]`: the sampler that draws tasks, and the gate that rejects groups.

`headrace.orchestrator.curriculum` and `headrace.orchestrator.gate` declare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.config.base import Config
from headrace.config.registry import Alternative, Registry

SAMPLERS: Registry[SamplerConfig] = Registry("sampler")
GATES: Registry[GateConfig] = Registry("gate")


class SamplerConfig(Alternative):
    REGISTRY = SAMPLERS

    type: str

    def make(self, tasks: Sequence[Any]) -> Any:
        """Return the `TaskSampler`; None for the default, `Shuffled`."""
        raise NotImplementedError

    def check_imports(self) -> None:
        """Raise `BadInput` if the user's class cannot be imported or does not take its kwargs; it is not called."""


class GateConfig(Alternative):
    REGISTRY = GATES
    READS_ADVANTAGES: ClassVar[bool] = False

    type: str

    def make(self) -> Any:
        """Return the `Gate`; None if every group passes."""
        raise NotImplementedError

    def check_imports(self) -> None:
        """Raise `BadInput` if the user's class cannot be imported or does not take its kwargs; it is not called."""


class CurriculumConfig(Config):
    """How tasks are drawn and groups are rejected; a text is the `type` of a sampler or gate."""

    sampler: SamplerConfig | None = None
    """How tasks are drawn; unset: `shuffled`."""
    gate: GateConfig | None = None
    """Which groups are trained on; unset: all."""

    def over(self, default: CurriculumConfig) -> CurriculumConfig:
        """Return this section with unset keys from `default`."""
        return CurriculumConfig(sampler=self.sampler or default.sampler, gate=self.gate or default.gate)
