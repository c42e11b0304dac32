"""Linear length penalty: a price for every token, times the group's pass rate.

    term = -pass_rate * price,    price = coef * tokens / seq_len,
                                  or weights of output, input and turns over the largest of the group

A group that mostly fails must not learn to be brief first, so the price is scaled by the pass rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import msgspec
import numpy as np
from pydantic import Field, model_serializer, model_validator

from headrace.algorithms.length_penalty import LengthPenaltyDeclaration
from headrace.algorithms.tally import Tally
from headrace.config.algorithms import LENGTH_PENALTIES
from headrace.errors import InvalidValue
from headrace.rollout.cohort import Cohort


@LENGTH_PENALTIES.register
class LinearPenaltyConfig(LengthPenaltyDeclaration):
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

    def make(self, seq_len: int) -> Linear:
        if self.normalize_by == "group_max":
            weights = self.output_weight, self.input_weight, self.turns_weight
            return Linear.by_group_max(*weights, gated=self.gate_by_correctness)
        return Linear.by_seq_len(self.coef, seq_len, gated=self.gate_by_correctness)

    @property
    def _unused(self) -> set[str]:
        """Keys that have no effect under this `normalize_by`."""
        return {"coef"} if self.normalize_by == "group_max" else {"output_weight", "input_weight", "turns_weight"}

    @model_validator(mode="after")
    def _refuse_unused_keys(self) -> Self:
        for key in sorted(self._unused & self.model_fields_set):
            raise InvalidValue(
                f'has no effect with normalize_by = "{self.normalize_by}"',
                key=key,
                value=getattr(self, key),
                fix="Set output_weight, input_weight and turns_weight instead."
                if key == "coef"
                else 'Set normalize_by = "group_max", or coef instead.',
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, serialize: Any) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in self._unused}


class Linear(msgspec.Struct, frozen=True):
    """A price for all rollouts, or for the correct ones, that grows with the group's pass rate."""

    price: Callable[[Cohort], np.ndarray]
    gated: bool = False
    """Only rollouts with reward 1 pay."""
    plain_mean: bool = False

    @classmethod
    def by_seq_len(cls, coef: float, seq_len: int, *, gated: bool = False) -> Linear:
        return cls(partial(price_by_seq_len, coef=coef, seq_len=seq_len), gated)

    @classmethod
    def by_group_max(cls, output: float, input: float, turns: float, *, gated: bool = False) -> Linear:
        price = partial(price_by_group_max, output_weight=output, input_weight=input, turns_weight=turns)
        return cls(price, gated)

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        if cohort.pass_rate < 0:
            tally.count("negative_pass_rate")
        return -linear(self.price(cohort), cohort.rewards, gated=self.gated)


def price_by_seq_len(cohort: Cohort, coef: float, seq_len: int) -> np.ndarray:
    """Return coef * tokens / seq_len."""
    return np.asarray(coef * cohort.output_tokens / seq_len)


def price_by_group_max(cohort: Cohort, output_weight: float, input_weight: float, turns_weight: float) -> np.ndarray:
    """Return the weighted sum of output tokens, input tokens and turns, each divided by the largest of the group."""
    return np.asarray(
        output_weight * _share_of_largest(cohort.output_tokens)
        + input_weight * _share_of_largest(cohort.context_tokens)
        + turns_weight * _share_of_largest(cohort.turns)
    )


def _share_of_largest(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return np.asarray(values / largest) if largest > 0 else np.zeros_like(values)


def linear(price: np.ndarray, rewards: np.ndarray, *, gated: bool) -> np.ndarray:
    """Return pass_rate * price, a negative pass rate counted as 0; `gated`: 0 unless the reward is 1."""
    penalty = max(float(rewards.mean()), 0.0) * price
    return np.where(rewards == 1, penalty, 0.0) if gated else np.asarray(penalty)
