"""`[launch]`: the processes of a run and the machine they run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import HttpUrl

CACHE_VARIABLE = "HEADRACE_CACHE"
"""The environment variable with the cache directory of Headrace; in a run, its storage root."""
EXPORTED_WINS = ("HF_HUB_OFFLINE", "WANDB_MODE")
"""Variables of `env` that a run file does not change where the user has exported them."""


def without_exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a run file that take effect beside those that the user has exported."""
    return {name: value for name, value in env.items() if not (name in EXPORTED_WINS and os.environ.get(name))}


class LaunchConfig(Config):
    """How `headrace rl` and `headrace sft` run the processes on this machine."""

    trainer_processes: int | None = Field(None, ge=1)
    """Ranks that train together, each on a GPU of its own; unset: half of the GPUs, all of them where nobody samples,
    one rank without any."""
    inference_gpus: int | None = Field(None, ge=1)
    """GPUs that sample; unset: those that the trainer leaves. A single GPU is shared."""
    inference_servers: int | None = Field(None, ge=1)
    """Servers that sample; unset: one per sampling GPU (of vLLM in parallel, one per its GPUs), or one without any."""
    sharing: Literal["alternate", "overlap"] | None = None
    """How trainer and servers share a single GPU: in turns, the engine standing still during a training step and giving
    its KV cache up where memory is short; or both at once, each within a part of the memory. Unset: in turns, but for
    evaluation beside SFT, where nobody would ever wait. `alternate` does the same on a machine without GPUs."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank and of each server; unset: half the cores divided by their number, all of them for SFT
    without evaluation, where only the trainer computes."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds until every process must be up; they count anew when one is started again. vLLM has its own on top."""
    stop_timeout: float = Field(10.0, gt=0)
    """Seconds that a process gets to end in order before it is killed."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for all processes of the run, and for what is looked up before they start. `WANDB_MODE` and
    `HF_HUB_OFFLINE` that you have exported win."""
    env_from: dict[str, str] = Field(default_factory=dict)
    """More of them, by the variable here that has the value: `HF_TOKEN = "MY_TOKEN"`; values are not kept anywhere."""
    max_restarts: int = Field(3, ge=0)
    """How often in a row, without progress of the run, a process that was killed is started again."""
    heartbeat_url: HttpUrl | None = None
    """Where the launcher POSTs `heartbeat.json` while the run goes on, and when it has finished or was stopped: for a
    service that raises an alarm when it hears nothing. Unset: nowhere."""
    heartbeat_interval: float = Field(60.0, gt=0)
    """Seconds from one POST to the next."""

    @property
    def storage_root(self) -> Path | None:
        """The storage root of the run (`storage.cache_dir`), absolute; None where its file names none."""
        root = self.env.get(CACHE_VARIABLE)
        return None if root is None else Path(root)
