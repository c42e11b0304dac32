"""Where a run's metrics go besides its own files: `[wandb]`, `[tensorboard]`, `[trackio]`, `[prometheus]`, `[otel]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import HttpUrl

MONITORS = ("wandb", "tensorboard", "trackio", "prometheus", "otel")
"""The sections of a run file that change nothing of what a run does."""


class SamplesConfig(Config):
    """The tables of rollouts that a monitor shows."""

    samples: int = Field(8, ge=0)
    """Rollouts per table, sorted by reward from lowest to highest; 0: no table."""
    samples_interval: int = Field(10, ge=1)
    """Steps between tables."""
    eval_samples: int = Field(8, ge=0)
    """Rollouts in the table of each evaluation of an environment; 0: no table."""


class WandbConfig(SamplesConfig):
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


class TensorboardConfig(SamplesConfig):
    enabled: bool = True
    """Whether the files are written."""


class TrackioConfig(SamplesConfig):
    enabled: bool = True
    """Whether the files are written."""
    project: str = "headrace"
    """The trackio project."""
    name: str | None = None
    """The run's name in trackio; unset: the name of its directory."""
    dir: Path | None = None
    """The directory of trackio's database, for `TRACKIO_DIR=DIR trackio show`; unset: `trackio` in the run's
    directory."""


class PrometheusConfig(Config):
    enabled: bool = True
    """Whether each process serves its metrics."""
    host: str = "127.0.0.1"
    """The address that they listen on. Others than the loopback address let everyone who reaches it read the metrics:
    there is no key."""
    port: int = Field(0, ge=0, le=65535)
    """Each process listens on the first free port from this one on; 0: on any free port. `prometheus/targets` in the
    run's directory has the addresses, for `file_sd_configs` of Prometheus."""


class OtelConfig(Config):
    enabled: bool = True
    """Whether episodes are traced."""
    endpoint: HttpUrl = "http://127.0.0.1:4318/v1/traces"
    """The URL of a collector that takes OTLP over HTTP."""
    share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the episodes that are traced, chosen at random."""
