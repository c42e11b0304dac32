"""Repetition filter: many tokens in a row of which the policy was nearly certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.config.orchestrator import FILTERS, FilterConfig
from headrace.rollout.types import NOT_SAMPLED, Rollout


@FILTERS.register
class RepetitionConfig(FilterConfig):
    """Many tokens in a row of which the policy was nearly certain."""

    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Tokens in a row that must be nearly certain."""
    prob_threshold: float = Field(0.99, gt=0, lt=1)
    """The probability above which a token is nearly certain."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return partial(is_repetitive, window=self.window, prob_threshold=self.prob_threshold)


def is_repetitive(rollout: Rollout, window: int, prob_threshold: float) -> bool:
    """Return whether `window` sampled tokens in a row are nearly certain; the streak spans turns."""
    if sum(np.count_nonzero(s.mask) for s in rollout.samples) < window:
        return False
    floor = math.log(prob_threshold)  # rollouts of another model have no logprobs, and never match
    certain = np.concatenate([((s.logprobs > floor) & (s.versions != NOT_SAMPLED))[s.mask] for s in rollout.samples])
    doubts = np.flatnonzero(~certain)
    return bool(np.any(np.diff(doubts, prepend=-1, append=len(certain)) > window))
