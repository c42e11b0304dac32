"""Linear length penalty: a price for every token, times the group's pass rate.

    term = -pass_rate * price,    price = coef * tokens / seq_len,
                                  or weights of output, input and turns over the largest of the group

A group that mostly fails must not learn to be brief first, so the price is scaled by the pass rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_serializer

from headrace.algorithms.base import Tally
from headrace.algorithms.length_penalties import LENGTH_PENALTIES, LengthPenaltyConfig
from headrace.errors import InvalidValue
from headrace.rollout.credit import Cohort


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
            yield InvalidValue(
                f'has no effect with normalize_by = "{self.normalize_by}"',
                key=key,
                value=getattr(self, key),
                fix="Set output_weight, input_weight and turns_weight instead."
                if key == "coef"
                else 'Set normalize_by = "group_max", or coef instead.',
            )

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, serialize: Any) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in self._unused}


def _share_of_largest(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return np.asarray(values / largest) if largest > 0 else np.zeros_like(values)
