"""What a length penalty is to a group's credit."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.algorithms.tally import Tally
from headrace.config.algorithms import LengthPenaltyConfig
from headrace.rollout.cohort import Cohort


class LengthPenalty(Protocol):
    @property
    def plain_mean(self) -> bool:
        """Whether it is defined over the plain mean of the group, whatever baseline the credit has."""

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        """Return what is added to each rollout's reward, before it is centered."""


class LengthPenaltyDeclaration(LengthPenaltyConfig):
    """A length penalty of a run file that can be made."""

    def make(self, seq_len: int) -> LengthPenalty:
        raise NotImplementedError


def make_penalty(config: LengthPenaltyConfig, seq_len: int) -> LengthPenalty:
    assert isinstance(config, LengthPenaltyDeclaration)
    return config.make(seq_len)
