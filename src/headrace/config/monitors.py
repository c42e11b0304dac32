"""`[wandb]` and `[tensorboard]`: monitors that a run reports to."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config


class WandbConfig(Config):
    project: str = "headrace"
    """The project that the run appears in."""
    name: str | None = None
    """What the run is called there; unset: the name of its directory."""
    entity: str | None = None
    """The user or team that the project belongs to; unset: your default."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Whether metrics are sent at once, kept on disk to be sent later, or not handed on at all. An exported
    `WANDB_MODE` wins."""
    dir: Path | None = None
    """Where W&B makes its folder `wandb`; unset: in the run's directory."""
    samples: int = Field(8, ge=0)
    """Rollouts shown in a table, from the worst reward to the best; 0: no table."""
    samples_interval: int = Field(10, ge=1)
    """Steps from one table to the next."""
    eval_samples: int = Field(8, ge=0)
    """Rollouts of each evaluation of an environment shown in a table of their own; 0: no table."""


class TensorboardConfig(Config):
    enabled: bool = True
    """Whether the files are written."""
    samples: int = Field(8, ge=0)
    """As in `[wandb]`."""
    samples_interval: int = Field(10, ge=1)
    """Steps from one table to the next."""
    eval_samples: int = Field(8, ge=0)
    """As in `[wandb]`."""
