"""Group-relative credit: a sum of terms, all centered by one and the same baseline B over the group.

    A = center(r) + center(-p) + center(bonus) + ...    center(x) = x - B(x)

    B      mean(x); length-weighted, sum(len * x) / sum(len)
    r      the reward; normalize = "std" divides its term, and no other, by std(r) + 1e-6
    p      a length penalty
    bonus  what a function of the user gives for each rollout of the group

Centering is linear, so without normalization this is the credit of the reward r - p + bonus.

Left out on purpose: any memory from group to group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from headrace.algorithms.base import RolloutView
from headrace.algorithms.length_penalty import Efficiency, LengthPenalty
from headrace.algorithms.tally import Tally
from headrace.algorithms.user_function import name_of, numbers
from headrace.rollout.cohort import Cohort
from headrace.rollout.credit import ROUNDING, center, standardize

Term = Callable[[Sequence[RolloutView]], Any]
"""A bonus, one number for each rollout of the group, in units of reward."""


class GroupCredit:
    def __init__(
        self,
        normalize: Literal["std"] | None = None,
        length_weighted: bool = False,
        penalty: LengthPenalty | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        self._of_reward = standardize if normalize == "std" else center
        self._length_weighted = length_weighted and not isinstance(penalty, Efficiency)
        self._penalty = penalty
        self._terms = terms

    def of(self, group: Sequence[RolloutView], tally: Tally) -> np.ndarray:
        """One advantage per rollout, in float64."""
        cohort = Cohort.of([view.rollout for view in group])
        lengths = cohort.output_tokens if self._length_weighted else None
        bonuses = [_bonus(term, group) for term in self._terms]
        if self._penalty is not None:
            bonuses.append(self._penalty.term(cohort, tally))
        credit = self._of_reward(cohort.rewards, lengths) + sum(center(bonus, lengths) for bonus in bonuses)
        return _without_rounding(credit, [cohort.rewards, *bonuses])


def _without_rounding(credit: np.ndarray, terms: Sequence[np.ndarray]) -> np.ndarray:
    """Exactly zero where terms cancel but for their last bits, which are no signal."""
    largest = max(float(np.abs(term).max(initial=0.0)) for term in terms)
    return np.where(np.abs(credit) < ROUNDING * largest, 0.0, credit)


def _bonus(term: Term, group: Sequence[RolloutView]) -> np.ndarray:
    bonus = numbers(term(group), term)
    if bonus.shape != (len(group),):
        raise ValueError(
            f"{name_of(term)} gave an array of shape {bonus.shape} for a group of {len(group)} rollouts: "
            "it must give one number for each"
        )
    return bonus
