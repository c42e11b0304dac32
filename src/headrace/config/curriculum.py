"""`[orchestrator.train.curriculum]`: the sampler that draws tasks, and the gate that rejects groups."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from headrace.config.base import Config
from headrace.config.shorthand import spelled_out
from headrace.errors import InvalidValue


class ShuffledConfig(Config):
    """Random order without replacement: each task once per pass over all tasks."""

    type: Literal["shuffled"] = "shuffled"


class InOrderConfig(Config):
    """In the order of the environment, repeated after the last task."""

    type: Literal["in_order"] = "in_order"


class PoolWeightsConfig(Config):
    """Relative probability of drawing a task, by its pool."""

    unseen: float = Field(1.0, ge=0)
    """Weight of tasks that have not been drawn yet."""
    hard: float = Field(0.2, ge=0)
    """Weight of hard tasks."""
    normal: float = Field(1.0, ge=0)
    """Weight of normal tasks."""
    easy: float = Field(0.2, ge=0)
    """Weight of easy tasks."""


class DifficultyPoolConfig(Config):
    """Tasks by the mean reward of their latest group, drawn with replacement, with a weight for each pool."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    hard_max: float = 0.25
    """Mean reward up to which a task is hard."""
    normal_max: float = 0.75
    """Mean reward up to which a task is normal; above it, a task is easy."""
    weights: PoolWeightsConfig = Field(default_factory=PoolWeightsConfig)

    @model_validator(mode="after")
    def _pools_are_apart(self) -> Self:
        if self.hard_max >= self.normal_max:
            raise InvalidValue(
                f"not below normal_max, which is {self.normal_max:g}: no task would be normal",
                key="hard_max",
                value=self.hard_max,
                fix="Lower hard_max, or raise normal_max.",
            )
        if not any(self.weights.model_dump().values()):
            raise InvalidValue("every weight is 0", key="weights", fix="Set the weight of at least one pool above 0.")
        return self


class ImportedSamplerConfig(Config):
    """A sampler of your own: a subclass of `headrace.orchestrator.curriculum.TaskSampler`."""

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor, besides the tasks."""


class NoGateConfig(Config):
    """Every group passes."""

    type: Literal["none"] = "none"


class AdvantageRangeConfig(Config):
    """Rejects a group in which every trainable advantage is in `[reject_min, reject_max]`."""

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: float = 0.0
    """Lower end of the rejected range, included."""
    reject_max: float = 0.0
    """Upper end of the rejected range, included."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.reject_min > self.reject_max:
            raise InvalidValue(
                f"above reject_max, which is {self.reject_max:g}: nothing would be rejected",
                key="reject_min",
                value=self.reject_min,
                fix="Lower reject_min, or raise reject_max.",
            )
        return self


class ImportedGateConfig(Config):
    """A gate of your own: a subclass of `headrace.orchestrator.gate.Gate`."""

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""


def _kind(value: Any) -> str:
    chosen = str(value.get("type", "") if isinstance(value, dict) else getattr(value, "type", ""))
    return "imported" if ":" in chosen else chosen


def _type_alone(value: Any) -> Any:
    return spelled_out(value, "type")


SamplerConfig = Annotated[
    Annotated[ShuffledConfig, Tag("shuffled")]
    | Annotated[InOrderConfig, Tag("in_order")]
    | Annotated[DifficultyPoolConfig, Tag("difficulty_pool")]
    | Annotated[ImportedSamplerConfig, Tag("imported")],
    Discriminator(
        _kind,
        custom_error_type="no_such_sampler",
        custom_error_message="known types are shuffled, in_order and difficulty_pool; your own is package.module:Class",
    ),
    BeforeValidator(_type_alone),
]

GateConfig = Annotated[
    Annotated[NoGateConfig, Tag("none")]
    | Annotated[AdvantageRangeConfig, Tag("advantage_range")]
    | Annotated[ImportedGateConfig, Tag("imported")],
    Discriminator(
        _kind,
        custom_error_type="no_such_gate",
        custom_error_message="known types are advantage_range and none; your own is package.module:Class",
    ),
    BeforeValidator(_type_alone),
]


class CurriculumConfig(Config):
    """How tasks are drawn and groups are rejected; a text is the `type` of a sampler or gate."""

    sampler: SamplerConfig | None = None
    """How tasks are drawn; unset: `shuffled`."""
    gate: GateConfig | None = None
    """Which groups are trained on; unset: all."""

    def over(self, default: CurriculumConfig) -> CurriculumConfig:
        """Return this section with unset keys from `default`."""
        return CurriculumConfig(sampler=self.sampler or default.sampler, gate=self.gate or default.gate)
