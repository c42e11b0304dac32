"""Group-relative credit: a sum of terms, all centered by the same baseline B over the group.

    A = center(r) + center(-p) + center(bonus) + ...    center(x) = x - B(x)

    B      mean(x); length-weighted, sum(len * x) / sum(len)
    r      the reward; normalize = "std" divides its term, and no other, by std(r) + 1e-6
    p      a length penalty
    bonus  the value of a user's function for each rollout of the group

Centering is linear, so without normalization this is the credit of the reward r - p + bonus.

Left out on purpose: state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import Field

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, Tally, as_finite_array
from headrace.algorithms.length_penalties import LengthPenalty, LengthPenaltyConfig
from headrace.config.algorithms import FINAL, AdvantageConfig, ImportConfig, Invariant, Promises
from headrace.errors import InvalidValue
from headrace.imports import load_function, name_of
from headrace.rollout.credit import ROUNDING, Cohort, baseline, center, standardize

Term = Callable[[Sequence[RolloutView]], Any]
"""A user's function that returns one bonus per rollout of the group, in units of reward."""


class CreditTermsConfig(AdvantageConfig):
    """Standardized reward, plus terms that are centered by their own means."""

    COMPARES = True

    length_penalty: LengthPenaltyConfig | None = None
    """What length costs a rollout; unset: nothing."""
    terms: list[ImportConfig] = Field(default_factory=list)
    """Functions of the group that give a bonus for each rollout, one more term of credit each."""

    @property
    def reads_tasks(self) -> bool:
        return bool(self.terms)

    @property
    def baseline(self) -> tuple[Literal["std"] | None, bool]:
        """How the reward is normalized, and whether the baseline is weighted by length."""
        return "std", False

    def make_credit(self, context: MakeContext) -> GroupCredit:
        penalty = None if self.length_penalty is None else self.length_penalty.make(context.seq_len)
        return GroupCredit(*self.baseline, penalty=penalty, terms=self._load_terms())

    def check_imports(self) -> None:
        self._load_terms()

    def promises(self, algorithm: Algorithm) -> Promises:
        kept: set[Invariant] = {"zero_sum"}
        reasons: dict[Invariant, str] = {"signs": FINAL}
        if self.length_penalty is not None and self.length_penalty.SHIFT_REASON:
            reasons["shift"] = self.length_penalty.SHIFT_REASON
        elif not self.terms:
            kept.add("shift")
        if not self.terms:  # a term may read anything
            kept.add("order")
        reward_alone = self.length_penalty is None and not self.terms
        return Promises(frozenset(kept), reasons, self.baseline[1], reward_alone)

    def _load_terms(self) -> list[Term]:
        return [load_function(term.import_path, term.kwargs, "term") for term in self.terms]


class GroupCreditConfig(CreditTermsConfig):
    """Reward minus the group's baseline, plus terms that are centered by the same baseline."""

    normalize: Literal["std"] | None = None
    """`std`: divide the centered reward by the group's standard deviation."""
    length_weighted_baseline: bool = False
    """The baseline is the mean over tokens, not over rollouts."""

    @property
    def baseline(self) -> tuple[Literal["std"] | None, bool]:
        return self.normalize, self.length_weighted_baseline

    def problems(self) -> Iterator[InvalidValue]:
        yield from super().problems()
        if self.length_weighted_baseline and self.length_penalty is not None and self.length_penalty.OWN_BASELINE:
            fact = f'length_penalty.type = "{self.length_penalty.type}" has a baseline of its own, the plain mean'
            fix = 'Leave it out, or set length_penalty.type to "linear" or "overlong".'
            yield self.invalid("length_weighted_baseline", fact, fix)


class GroupCredit:
    """Computes the advantages of a group as a sum of centered terms: reward, users' terms, length penalty."""

    def __init__(
        self,
        normalize: Literal["std"] | None = None,
        length_weighted: bool = False,
        penalty: LengthPenalty | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        self._standardizes_reward = normalize == "std"
        self._length_weighted = length_weighted
        self._penalty = penalty
        self._terms = terms

    def advantages(self, group: Sequence[RolloutView], tally: Tally) -> np.ndarray:
        """Return one advantage per rollout, float64."""
        reward, *others = terms = self.terms(group, tally)
        credit = reward.values + sum(term.values for term in others)
        largest = max(float(np.abs(term.raw).max(initial=0.0)) for term in terms)
        return np.where(np.abs(credit) < ROUNDING * largest, 0.0, credit)  # terms may cancel up to rounding

    def terms(self, group: Sequence[RolloutView], tally: Tally) -> list[CreditTerm]:
        """Return the terms whose sum is the advantage, that of the reward first."""
        cohort = Cohort.of([view.rollout for view in group])
        lengths = cohort.trained_tokens if self._length_weighted else None
        center_key = "length_weighted_baseline" if self._length_weighted else ""
        mean = "mean over tokens" if self._length_weighted else "mean"

        def centered(name: str, raw: np.ndarray, key: str) -> CreditTerm:
            formula = f"{name} - {mean}({name})"
            return CreditTerm(name, raw, baseline(raw, lengths), center(raw, lengths), formula, key)

        reward = centered("reward", cohort.rewards, center_key)
        if self._standardizes_reward:
            values, formula = standardize(cohort.rewards, lengths), f"({reward.formula}) / (std(reward) + 1e-6)"
            reward = msgspec.structs.replace(reward, values=values, formula=formula, key="normalize")
        bonuses = []
        for number, term in enumerate(self._terms):
            bonus = as_finite_array(term(group), term)
            if bonus.shape != (len(group),):
                fact = f"{name_of(term)} returned an array of shape {bonus.shape} for a group of {len(group)} rollouts"
                raise ValueError(f"{fact}: it must return one number for each")
            bonuses.append(centered(name_of(term), bonus, f"terms.{number}"))
        if self._penalty is not None:
            bonuses.append(centered("length penalty", self._penalty(cohort, tally), "length_penalty"))
        return [reward, *bonuses]
