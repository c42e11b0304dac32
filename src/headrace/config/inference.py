"""`[inference]`: the server that samples the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import ModelConfig, RendererConfig


class InferenceConfig(Config):
    model: ModelConfig = Field(default_factory=ModelConfig)
    output_dir: Path | None = None
    served_name: str | None = None
    """What clients call the model; unset: its directory or its name on the hub."""
    renderer: RendererConfig = Field(default_factory=RendererConfig)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0 takes any free port; the run directory says which."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt plus completion; unset: the run's `seq_len`, else the model's own limit (at most 4096).

    A run whose policy scores its own samples with hints before them (opsd, rlcsd) needs more: there it is
    2 * seq_len + 256 unless set, since a hint may be as long as a response.
    """
    max_running: int = Field(128, ge=1)
    """Requests decoded together; more wait in line."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of requests that are in flight when new weights arrive."""
    seed: int = 0
