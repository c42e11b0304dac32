"""`[orchestrator.algo.length_penalty]`: what length costs a rollout."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from headrace.config.base import Config
from headrace.config.shorthand import spelled_out
from headrace.errors import InvalidValue


class LinearPenaltyConfig(Config):
    """p = coef * pass_rate * tokens / seq_len; or with `normalize_by`, weights over the group's own largest."""

    type: Literal["linear"] = "linear"
    coef: float = Field(0.25, ge=0)
    gate_by_correctness: bool = False
    """Only rollouts with reward 1 pay."""
    normalize_by: Literal["seq_len", "group_max"] = "seq_len"
    output_weight: float = Field(0.25, ge=0)
    """With `group_max`: of the tokens that the model wrote, ..."""
    input_weight: float = Field(0.1, ge=0)
    """of the tokens that it was given, ..."""
    turns_weight: float = Field(0.1, ge=0)
    """and of its turns."""

    @property
    def _idle(self) -> set[str]:
        """Keys that say nothing under this `normalize_by`."""
        return {"coef"} if self.normalize_by == "group_max" else {"output_weight", "input_weight", "turns_weight"}

    @model_validator(mode="after")
    def _no_idle_key(self) -> Self:
        for key in sorted(self._idle & self.model_fields_set):
            coef = key == "coef"
            raise InvalidValue(
                f'has no effect with normalize_by = "{self.normalize_by}"',
                key=key,
                value=getattr(self, key),
                fix="Set output_weight, input_weight and turns_weight instead."
                if coef
                else 'Set normalize_by = "group_max", or coef instead.',
            )
        return self

    @model_serializer(mode="wrap")
    def _without_idle_keys(self, serialize: Any) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in self._idle}


class TokensPenaltyConfig(Config):
    """Correct rollouts cheaper than the average correct one earn up to twice their reward; cost in tokens."""

    type: Literal["tokens"] = "tokens"
    completion_weight: float = Field(1.0, ge=0)
    tool_response_weight: float = Field(1.0, ge=0)


class TurnsPenaltyConfig(Config):
    """As `tokens`; cost in turns."""

    type: Literal["turns"] = "turns"


class OverlongPenaltyConfig(Config):
    """p = 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    cache_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _begins_at_a_length(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise InvalidValue(
                f"above max_tokens, which is {self.max_tokens}, though it is the last part of them, over which the "
                "penalty grows",
                key="cache_tokens",
                value=self.cache_tokens,
                fix=f"Lower it to at most {self.max_tokens}.",
            )
        return self


def _penalty_spelled_out(given: Any) -> Any:
    table = spelled_out(given, "type")
    if isinstance(table, dict) and table.get("type") not in _PENALTIES:
        raise InvalidValue(
            "not set" if "type" not in table else "unknown length penalty",
            key="type",
            value=table.get("type"),
            fix=f"Set one of {', '.join(_PENALTIES)}.",
        )
    return table


_PENALTIES = ("linear", "tokens", "turns", "overlong")
LengthPenaltyConfig = Annotated[
    LinearPenaltyConfig | TokensPenaltyConfig | TurnsPenaltyConfig | OverlongPenaltyConfig,
    Field(discriminator="type"),
    BeforeValidator(_penalty_spelled_out),
]
