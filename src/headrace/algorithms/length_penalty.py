"""Length penalties as terms of a group's credit: what each adds to a rollout's reward, before it is centered.

    linear      -p,  p = pass_rate * price, the price in units of seq_len or of the group's largest
    overlong    -p,  p = 0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens
    efficiency  r' - r,  r' = r * (1 + clamp(1 - cost / mean_correct_cost, 0, 1)) for the correct, r for the others

The maths is in `headrace.rollout.length_penalty`; here it gets its settings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from headrace.algorithms.tally import Tally
from headrace.rollout import length_penalty as maths
from headrace.rollout.cohort import Cohort


class Linear(msgspec.Struct, frozen=True):
    """A price for everybody, or for the correct, the higher the more of the group are correct."""

    price: Callable[[Cohort], np.ndarray]
    gated: bool = False
    """Only the correct pay: those with reward 1."""

    @classmethod
    def by_seq_len(cls, coef: float, seq_len: int, *, gated: bool = False) -> Linear:
        return cls(partial(maths.price_by_seq_len, coef=coef, seq_len=seq_len), gated)

    @classmethod
    def by_group_max(cls, output: float, input: float, turns: float, *, gated: bool = False) -> Linear:
        price = partial(maths.price_by_group_max, output_weight=output, input_weight=input, turns_weight=turns)
        return cls(price, gated)

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        if cohort.pass_rate < 0:
            tally.count("negative_pass_rate")
        return -maths.linear(self.price(cohort), cohort.rewards, gated=self.gated)


class Overlong(msgspec.Struct, frozen=True):
    max_tokens: int
    cache_tokens: int

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        return -maths.overlong(cohort.output_tokens, self.max_tokens, self.cache_tokens)


class Efficiency(msgspec.Struct, frozen=True):
    """A reward for being cheaper than the mean of the correct. It is defined over the plain mean, whatever else is."""

    cost: Callable[[Cohort], np.ndarray]

    @classmethod
    def in_tokens(cls, completion_weight: float = 1.0, tool_response_weight: float = 1.0) -> Efficiency:
        return cls(lambda cohort: completion_weight * cohort.output_tokens + tool_response_weight * cohort.tool_tokens)

    @classmethod
    def in_turns(cls) -> Efficiency:
        return cls(lambda cohort: cohort.turns)

    def term(self, cohort: Cohort, tally: Tally) -> np.ndarray:
        return maths.efficiency_bonus(cohort.rewards, self.cost(cohort))


LengthPenalty = Linear | Overlong | Efficiency
