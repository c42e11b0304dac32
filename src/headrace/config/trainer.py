"""`[trainer]`: the optimizer step and what it leaves on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headrace.config.base import Config
from headrace.config.model import ModelConfig


class AdamWConfig(Config):
    type: Literal["adamw"] = "adamw"
    lr: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""


class SchedulerConfig(Config):
    """The learning rate over the run, as a multiple of `optim.lr`."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_factor: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, at `max_steps`."""


class DefaultLossConfig(Config):
    """DPPO's binary mask on the probability difference, plus a squared log-ratio."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(0.2, ge=0)
    dppo_mask_high: float = Field(0.2, ge=0)
    adv_tau: float = Field(1.0, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


class IpoLossConfig(Config):
    """The default loss with a symmetric mask."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(0.1, ge=0)
    adv_tau: float = Field(1.0, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


def _loss_type(value: Any) -> str:
    return str(value.get("type", "default") if isinstance(value, dict) else value.type)


LossConfig = Annotated[
    Annotated[DefaultLossConfig, Tag("default")] | Annotated[IpoLossConfig, Tag("ipo")], Discriminator(_loss_type)
]


class RefKlConfig(Config):
    """The distillation component."""

    mask_low: float = Field(0.2, ge=0)
    kl_tau: float = Field(1e-3, ge=0)


class CheckpointConfig(Config):
    interval: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always gets one."""
    keep_last: int = Field(2, ge=1)


class TrainingConfig(Config):
    """What an RL run and an SFT run have in common."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    output_dir: Path | None = None
    max_steps: int | None = Field(None, ge=1)
    seq_len: int | None = Field(None, ge=2)
    """Tokens per packed bin, and the longest sequence that is trained."""
    seed: int = 0
    optim: AdamWConfig = Field(default_factory=AdamWConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    ckpt: CheckpointConfig = Field(default_factory=CheckpointConfig)
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more compute."""
    lm_head_chunk: int = Field(4096, ge=1)
    """Tokens whose logits exist at once."""


class TrainerConfig(TrainingConfig):
    loss: LossConfig = Field(default_factory=DefaultLossConfig)
    ref_kl: RefKlConfig = Field(default_factory=RefKlConfig)
    keep_weights: int = Field(2, ge=1)
    """Published versions kept on disk besides those that an engine may still load."""
