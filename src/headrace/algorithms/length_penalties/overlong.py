"""Overlong penalty (DAPO, arXiv 2503.14476): 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Tally
from headrace.algorithms.length_penalties import LENGTH_PENALTIES, LengthPenaltyConfig
from headrace.errors import InvalidValue
from headrace.rollout.credit import Cohort


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
            yield self.invalid(
                "cache_tokens",
                f"above max_tokens, which is {self.max_tokens}: it is the last part of them, over which the penalty "
                "grows",
                f"Lower it to at most {self.max_tokens}.",
            )
