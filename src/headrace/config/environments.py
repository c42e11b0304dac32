"""`[environments]`: what holds for all environments of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.config.base import Config, as_table


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
