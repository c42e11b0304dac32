"""`[wandb]` and `[tensorboard]`: monitors of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config


class WandbConfig(Config):
    project: str = "headrace"
    """The W&B project."""
    name: str | None = None
    """The run's name in W&B; unset: the name of its directory."""
    entity: str | None = None
    """The user or team that the project belongs to; unset: your default."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Whether metrics are sent, kept on disk to be sent later, or neither. An exported `WANDB_MODE` overrides it."""
    dir: Path | None = None
    """The directory of W&B's folder `wandb`; unset: the run's directory."""
    samples: int = Field(8, ge=0)
    """Rollouts per table, sorted by reward from lowest to highest; 0: no table."""
    samples_interval: int = Field(10, ge=1)
    """Steps between tables."""
    eval_samples: int = Field(8, ge=0)
    """Rollouts in the table of each evaluation of an environment; 0: no table."""


class TensorboardConfig(Config):
    enabled: bool = True
    """Whether the files are written."""
    samples: int = Field(8, ge=0)
    """Rollouts per table, as in `[wandb]`; 0: no table."""
    samples_interval: int = Field(10, ge=1)
    """Steps between tables."""
    eval_samples: int = Field(8, ge=0)
    """Rollouts in the table of each evaluation, as in `[wandb]`; 0: no table."""
