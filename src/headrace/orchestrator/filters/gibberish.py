"""Gibberish filter: a rare token (high id) that the policy itself found less likely than chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.config.orchestrator import FILTERS, FilterConfig
from headrace.rollout.types import Rollout


@FILTERS.register
class GibberishConfig(FilterConfig):
    """A rare token that the policy itself found less likely than chance."""

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100000, ge=0)
    """Tokens above this id are rare ones."""
    logprob_offset: float = Field(2.0, ge=0)
    """How far the logprob of a rare token must be below that of a uniform choice, in nats."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return partial(
            is_gibberish,
            vocab_size=vocab_size,
            token_id_threshold=self.token_id_threshold,
            logprob_offset=self.logprob_offset,
        )


def is_gibberish(rollout: Rollout, vocab_size: int, token_id_threshold: int, logprob_offset: float) -> bool:
    floor = -math.log(vocab_size) - logprob_offset
    return any(
        bool(np.any(s.mask & (s.token_ids > token_id_threshold) & (s.logprobs < floor)))
        for s in rollout.samples
        if s.token_ids.max(initial=0) > token_id_threshold  # few samples have any: skip the others quickly
    )
