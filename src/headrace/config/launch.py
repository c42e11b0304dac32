"""`[launch]`: the processes of a run and their devices; `[wandb]` and `[tensorboard]`: its monitors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import HttpUrl
from headrace.machine import CACHE_VARIABLE

EXPORTED_WINS = ("HF_HUB_OFFLINE", "WANDB_MODE")
"""Environment variables whose exported value takes precedence over that of a run file."""


def without_exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a run file, without those that an exported value overrides."""
    return {name: value for name, value in env.items() if not (name in EXPORTED_WINS and os.environ.get(name))}


class LaunchConfig(Config):
    """How `headrace rl` and `headrace sft` run the processes on this machine."""

    trainer_processes: int | None = Field(None, ge=1)
    """Trainer ranks, each on its own GPU; unset: half of the GPUs, all of them without an inference server, one rank
    without GPUs."""
    inference_gpus: int | None = Field(None, ge=1)
    """GPUs for inference; unset: those that the trainer does not use. A single GPU is shared."""
    inference_servers: int | None = Field(None, ge=1)
    """Inference servers; unset: one per inference GPU, or per group of GPUs of a parallel vLLM, or one without GPUs."""
    sharing: Literal["alternate", "overlap"] | None = None
    """How trainer and servers share a single GPU. `alternate`: the engine pauses during a training step, and frees its
    KV cache if memory is short; also on a machine without GPUs. `overlap`: both compute at once, each with a part of
    the memory. Unset: `alternate`, for evaluation during SFT `overlap`."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank and of each server; unset: half of the cores divided by their number, all cores for SFT
    without evaluation."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds until every process must be ready, again after a restart; vLLM's `start_timeout` is added."""
    stop_timeout: float = Field(10.0, gt=0)
    """Seconds between the request to stop and the kill of a process."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all processes of the run, and of the checks before they start. Exported `WANDB_MODE` and
    `HF_HUB_OFFLINE` take precedence."""
    env_from: dict[str, str] = Field(default_factory=dict)
    """Environment variables with the value of an exported one: `HF_TOKEN = "MY_TOKEN"`; the values are not saved."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of killed processes in a row, without progress of the run between them."""
    heartbeat_url: HttpUrl | None = None
    """URL to which the launcher POSTs `heartbeat.json` during the run and at its end, for a service that raises an
    alarm when heartbeats stop. Unset: none."""
    heartbeat_interval: float = Field(60.0, gt=0)
    """Seconds between heartbeats."""

    @property
    def storage_root(self) -> Path | None:
        """The absolute storage root of the run (`storage.cache_dir`); None if it is not set."""
        root = self.env.get(CACHE_VARIABLE)
        return None if root is None else Path(root)


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
