"""The run file of `headrace sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from headrace.config.base import Config
from headrace.config.model import RendererConfig
from headrace.config.trainer import TrainingConfig


class SftDataConfig(Config):
    """Exactly one of `path` and `env`."""

    path: Path | None = None
    """JSONL or Parquet with `messages`, or with `prompt` and `completion`."""
    env: str | None = None
    """An environment that can demonstrate its own tasks."""
    args: dict[str, Any] = Field(default_factory=dict)
    batch_size: int = Field(64, ge=1)
    """Examples per step."""

    @model_validator(mode="after")
    def _one_source(self) -> SftDataConfig:
        if (self.path is None) == (self.env is None):
            raise ValueError("give exactly one of path and env")
        return self


class SftConfig(TrainingConfig):
    PATHS_OF_FILE = ("data.path", "model.sft")

    data: SftDataConfig
    renderer: RendererConfig = Field(default_factory=RendererConfig)

    @model_validator(mode="after")
    def _check(self) -> SftConfig:
        if self.max_steps is None:
            raise ValueError("max_steps: a run needs an end; set the number of optimizer steps")
        if self.seq_len is None:
            raise ValueError("seq_len: set the longest sequence in tokens")
        return self
