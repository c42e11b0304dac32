"""The run file of `headrace dpo`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import MODEL_ORIGINS
from headrace.config.sft import HeldOutConfig, OfflineConfig, SourceConfig, TrainingDataConfig, exclusive


class PairColumnsConfig(Config):
    """Column names of the data; unset: the same as the key."""

    prompt: str | None = None
    """Column with the prompt, a text or messages. Rows without it have it at the beginning of both conversations."""
    chosen: str | None = None
    """Column with the preferred completion, a text or messages."""
    rejected: str | None = None
    """Column with the other completion, a text or messages."""
    tools: str | None = None
    """Column with the schemas of the tools in both conversations."""


class PairsConfig(SourceConfig):
    """Pairs of conversations: `prompt`, `chosen` and `rejected`."""

    columns: PairColumnsConfig = Field(default_factory=PairColumnsConfig)


class DpoDataConfig(PairsConfig, TrainingDataConfig):
    """Exactly one of `path` and `name`; `batch_size` counts pairs."""


class DpoValidationConfig(PairsConfig, HeldOutConfig):
    """Pairs to measure loss and accuracy on: exactly one of `path`, `name` and `fraction`."""


class DpoLossConfig(Config):
    """The loss of a pair. Its margin is the log-ratio of the chosen completion minus that of the rejected one."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: -log sigmoid(beta * margin), DPO itself. `ipo`: the square of margin - 1 / (2 * beta), with log-ratios
    per token."""
    beta: float = Field(0.1, gt=0)
    """How strongly the model is kept near the reference: smaller values let it move further."""
    reference_free: bool = False
    """Log-ratios to a uniform reference, that is logprobs alone; false: to the model that training starts from."""


class DpoConfig(OfflineConfig):
    COMMAND = "dpo"
    ALTERNATIVES = (
        MODEL_ORIGINS,
        ("data.path", "data.name"),
        ("validation.path", "validation.name", "validation.fraction"),
        *exclusive("data", "path", "name"),
        *exclusive("validation", "path", "name", "fraction"),
        ("scheduler.decay_steps", "scheduler.decay_fraction"),
    )

    dpo: DpoLossConfig
    data: DpoDataConfig
    """The pairs to train on."""
    validation: DpoValidationConfig | None = None
    """Held-out pairs, for `val/loss` and `val/accuracy`; unset: none. Of a `fraction`, no prompt is trained on."""

    @property
    def keeps_reference(self) -> bool:
        return self.lora is not None and not self.dpo.reference_free
