"""Length penalties, one per file: terms of a group's credit, each added to the reward before it is centered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np

from headrace.algorithms.base import Tally
from headrace.config.registry import Alternative, Registry
from headrace.rollout.credit import Cohort

LENGTH_PENALTIES: Registry[LengthPenaltyConfig] = Registry("length penalty")
LengthPenalty = Callable[[Cohort, Tally], np.ndarray]
"""A penalty for one `seq_len`: returns what is added to each rollout's reward, before it is centered."""


class LengthPenaltyConfig(Alternative):
    """A term of a group's credit that makes long rollouts worth less."""

    REGISTRY = LENGTH_PENALTIES
    OWN_BASELINE: ClassVar[bool] = False
    """Is defined over the plain mean of the group, and cannot be combined with a length-weighted baseline."""
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
        """Return what is added to each rollout's reward, before it is centered."""
        raise NotImplementedError
