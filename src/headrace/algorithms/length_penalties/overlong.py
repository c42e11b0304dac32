"""Overlong penalty (DAPO, arXiv 2503.14476): 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""

from __future__ import annotations

from typing import Literal, Self

import msgspec
import numpy as np
from pydantic import Field, model_validator

from headrace.algorithms.length_penalty import LengthPenaltyDeclaration
from headrace.algorithms.tally import Tally
from headrace.config.algorithms import LENGTH_PENALTIES
from headrace.errors import InvalidValue
from headrace.rollout.cohort import Cohort


@LENGTH_PENALTIES.register
class OverlongPenaltyConfig(LengthPenaltyDeclaration):
    """p = 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """The length at which the penalty is 1."""
    cache_tokens: int = Field(ge=1)
    """The last part of `max_tokens`, over which the penalty grows from 0."""

    def make(self, seq_len: int) -> Overlong:
        return Overlong(self.max_tokens, self.cache_tokens)

    @model_validator(mode="after")
    def _begins_at_a_length(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise InvalidValue(
                f"above max_tokens, which is {self.max_tokens}: it is the last part of them, over which the penalty "
                "grows",
                key="cache_tokens",
                value=self.cache_tokens,
                fix=f"Lower it to at most {self.max_tokens}.",
            )
        return self


class Overlong(msgspec.Struct, frozen=True):
    max_tokens: int
    cache_tokens: int
    plain_mean: bool = False

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        return -overlong(cohort.output_tokens, self.max_tokens, self.cache_tokens)


def overlong(tokens: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """Return a penalty of 0 to 1 per rollout."""
    return np.clip((tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)
