"""Length penalties: terms of a group's credit, each added to the reward before it is centered.

tokens, turns  r * clamp(1 - cost / mean_correct_cost, 0, 1) for the correct, 0 for the others; the cost is counted in
               tokens or in turns, and correct are the rollouts with the group's largest reward
linear         -pass_rate * price, price = coef * tokens / seq_len, or weights of output, input and turns over the
               largest of the group. A group that mostly fails must not learn to be brief first
overlong       DAPO (arXiv 2503.14476): 0 up to max_tokens - cache_tokens, then linearly to -1 at max_tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_serializer

from headrace.algorithms.base import Tally
from headrace.config.registry import Alternative, Registry
from headrace.errors import InvalidValue
from headrace.rollout.credit import Cohort

LENGTH_PENALTIES: Registry[LengthPenaltyConfig] = Registry("length penalty")
LengthPenalty = Callable[[Cohort, Tally], np.ndarray]
"""Returns for each rollout the number that is added to its reward, before centering."""


class LengthPenaltyConfig(Alternative):
    """A term of a group's credit that makes long rollouts worth less."""

    REGISTRY = LENGTH_PENALTIES
    OWN_BASELINE: ClassVar[bool] = False
    """Whether the penalty is defined with the plain mean of the group, not with a length-weighted baseline."""
    SHIFT_REASON: ClassVar[str] = ""
    """Why credit changes when a constant is added to all rewards; empty: it does not."""

    type: str

    @property
    def needs_seq_len(self) -> bool:
        """Whether lengths are measured in units of `seq_len`."""
        return False

    def make(self, seq_len: int) -> LengthPenalty:
        return partial(self.term, seq_len=seq_len)

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        """Return for each rollout the number that is added to its reward, before centering."""
        raise NotImplementedError


@LENGTH_PENALTIES.register
class TokensPenaltyConfig(LengthPenaltyConfig):
    """Correct rollouts cheaper than the average correct one earn up to twice their reward; cost in tokens."""

    OWN_BASELINE = True
    SHIFT_REASON = "the tokens penalty multiplies rewards"

    type: Literal["tokens"] = "tokens"
    completion_weight: float = Field(1.0, ge=0)
    """The cost of a token that the model wrote."""
    tool_response_weight: float = Field(1.0, ge=0)
    """The cost of a token of a tool's response."""

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        cost = self.completion_weight * cohort.output_tokens + self.tool_response_weight * cohort.tool_tokens
        return efficiency_bonus(cohort.rewards, cost)


@LENGTH_PENALTIES.register
class TurnsPenaltyConfig(LengthPenaltyConfig):
    """As `tokens`; cost in turns."""

    OWN_BASELINE = True
    SHIFT_REASON = "the turns penalty multiplies rewards"

    type: Literal["turns"] = "turns"

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        return efficiency_bonus(cohort.rewards, cohort.turns)


def efficiency_bonus(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return one bonus per rollout, larger for cheaper correct ones; 0 for all unless largest reward and mean cost are
    positive."""
    best = rewards.max()
    correct = rewards == best
    mean_cost = cost[correct].mean()
    if best <= 0 or mean_cost <= 0:
        return np.zeros_like(rewards)
    return np.where(correct, rewards * np.clip(1 - cost / mean_cost, 0.0, 1.0), 0.0)


@LENGTH_PENALTIES.register
class LinearPenaltyConfig(LengthPenaltyConfig):
    """p = coef * pass_rate * tokens / seq_len; or with `normalize_by`, weights over the group's own largest."""

    SHIFT_REASON = "a linear penalty grows with the mean reward"

    type: Literal["linear"] = "linear"
    coef: float = Field(0.25, ge=0)
    """The penalty of a rollout of `seq_len` tokens in a group whose rollouts are all correct."""
    gate_by_correctness: bool = False
    """Only rollouts with reward 1 pay."""
    normalize_by: Literal["seq_len", "group_max"] = "seq_len"
    """What length is measured against: the longest sequence, or the largest of the group."""
    output_weight: float = Field(0.25, ge=0)
    """With `group_max`: the price of the tokens that the model wrote."""
    input_weight: float = Field(0.1, ge=0)
    """With `group_max`: the price of the tokens that the model was given."""
    turns_weight: float = Field(0.1, ge=0)
    """With `group_max`: the price of its turns."""

    @property
    def needs_seq_len(self) -> bool:
        return self.normalize_by == "seq_len"

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        if cohort.pass_rate < 0:
            tally.count("negative_pass_rate")
        if self.normalize_by == "seq_len":
            price = self.coef * cohort.output_tokens / seq_len
        else:
            price = (
                self.output_weight * _share_of_largest(cohort.output_tokens)
                + self.input_weight * _share_of_largest(cohort.context_tokens)
                + self.turns_weight * _share_of_largest(cohort.turns)
            )
        pays = cohort.rewards == 1 if self.gate_by_correctness else np.ones(len(price), np.bool_)
        return np.where(pays, -max(cohort.pass_rate, 0.0) * price, 0.0)

    @property
    def _unused(self) -> set[str]:
        """Keys that have no effect under this `normalize_by`."""
        return {"coef"} if self.normalize_by == "group_max" else {"output_weight", "input_weight", "turns_weight"}

    def problems(self) -> Iterator[InvalidValue]:
        for key in sorted(self._unused & self.model_fields_set):
            fix = 'Set normalize_by = "group_max", or coef instead.'
            fix = "Set output_weight, input_weight and turns_weight instead." if key == "coef" else fix
            yield self.invalid(key, f'has no effect with normalize_by = "{self.normalize_by}"', fix)

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, serialize: Any) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in self._unused}


def _share_of_largest(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return np.asarray(values / largest) if largest > 0 else np.zeros_like(values)


@LENGTH_PENALTIES.register
class OverlongPenaltyConfig(LengthPenaltyConfig):
    """p = 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """The length at which the penalty is 1."""
    cache_tokens: int = Field(ge=1)
    """The last part of `max_tokens`, over which the penalty grows from 0."""

    def term(self, cohort: Cohort, tally: Tally, seq_len: int) -> np.ndarray:
        free = self.max_tokens - self.cache_tokens
        return -np.clip((cohort.output_tokens - free) / self.cache_tokens, 0.0, 1.0)

    def problems(self) -> Iterator[InvalidValue]:
        if self.cache_tokens > self.max_tokens:
            fact = f"above max_tokens, which is {self.max_tokens}: it is their last part, over which the penalty grows"
            yield self.invalid("cache_tokens", fact, f"Lower it to at most {self.max_tokens}.")
