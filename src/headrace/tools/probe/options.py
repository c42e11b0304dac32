"""What `headrace probe` takes in the way of a run file: `--args.key value`, `--renderer.key value`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import RendererConfig


class ProbeConfig(Config):
    args: dict[str, Any] = Field(default_factory=dict)
    """As in the environment's section of a run file."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    """As in the run file."""
