"""`[environments]`, what holds for all environments, and `[orchestrator.train.curriculum]`: sampler and gate.

`headrace.orchestrator.curriculum` and `headrace.orchestrator.gate` declare the samplers, which draw tasks, and the
gates, which reject groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from headrace.config.base import Config, as_table
from headrace.config.registry import Alternative, Registry


class SandboxConfig(Config):
    """How code that the model writes is kept from the rest of the machine. `sandbox = "strict"` sets `kind`.

    The limits are upper ones, for each solution: a reward may have lower ones of its own."""

    kind: Literal["auto", "strict", "rlimit"] = "auto"
    """`auto`: bubblewrap where it works, else process limits, with a notice of what those do not stop; `strict`: the
    run is refused where bubblewrap does not work; `rlimit`: process limits."""
    memory_mb: int = Field(2048, ge=64)
    """Memory of all processes together, in MB."""
    processes: int = Field(128, ge=4)
    """Processes and threads."""
    cpu_s: float = Field(600.0, gt=0)
    """CPU time of all processes together, in seconds."""
    output_mb: int = Field(64, ge=1)
    """Output, in MB."""


class EnvironmentsConfig(Config):
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)

    @field_validator("sandbox", mode="before")
    @classmethod
    def _text_is_kind(cls, value: Any) -> Any:
        return as_table(value, "kind")


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
