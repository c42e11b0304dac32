"""Comparison of two credits of the same rollouts: which rollouts have a signal, and their shares of the gradient.

"Then" is the credit that the run trained on, "now" that of another algorithm. The share of a rollout
(`headrace.rollout.routing`) divides each loss component by its member tokens in the step, and is summed over
components and steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from headrace.rollout.routing import GradientShare, gradient_shares
from headrace.rollout.types import Rollout, Sample
from headrace.tools.rescore.credit import Rescored

MAX_ROUNDING = 1e-6
"""Largest difference between float32 streams that counts as equal."""
CAPTION = (
    "Share of the gradient: the sum over trained tokens of |advantage| x weight (rl), weight (ce) or "
    "|reference - logprob| x weight (ref_kl), each loss over its trained tokens in the step. What the trainer's loss "
    "masks, and how far the policy had moved, is not in it."
)
QUANTILES = {"lowest": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "highest": 1.0}

Part = tuple[str, np.ndarray]
"""A name, and which rollouts belong to it."""


class Side(msgspec.Struct):
    """The credit of one side, then or now."""

    groups_with_signal: int
    """Groups with a rollout that trains."""
    rollouts_that_train: int
    """Rollouts that are shipped and have a gradient."""
    mean_abs_advantage: float | None
    """Over the sampled tokens of all credited rollouts; None without advantages."""
    advantages: dict[str, float]
    """Quantiles of a rollout's mean advantage, over all credited rollouts; empty without advantages."""
    components: dict[str, float]
    """Share of the gradient by loss component."""


class Share(msgspec.Struct):
    """The shares of some rollouts in all credited rollouts, in their sampled tokens, and in the gradient."""

    name: str
    rollouts: float
    tokens: float
    then: float
    now: float


class Comparison(msgspec.Struct):
    """The credit of the same rollouts then and now."""

    groups: int
    rollouts: int
    then: Side
    now: Side
    same: bool
    """Whether every token has the same credit, and the same rollouts train."""
    largest_difference: float
    """Between any two values of one stream at one token."""
    changed_sides: int
    """Rollouts that train on one side only."""
    correlation: float | None
    """Of the rollouts' mean advantages; None if one side has none, or they are all equal."""
    same_sign: float | None
    """Share of rollouts whose mean advantage is above, at or below zero on both sides."""
    by_environment: list[Share]
    by_length: list[Share]
    by_reward: list[Share]

    @property
    def shares(self) -> dict[str, list[Share]]:
        """The shares by the title of their grouping."""
        return {"environment": self.by_environment, "sampled tokens": self.by_length, "reward": self.by_reward}


class Collector:
    """Collects a few numbers of each rescored rollout, step by step."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []
        """Group and environment of each rollout."""
        self._rows: list[tuple[float, ...]] = []
        """Reward, sampled tokens, then mean advantage (NaN without), sum of |A| and gradient, each then and now."""
        self._components: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._largest_difference = 0.0
        self.changed_groups: dict[str, float] = {}
        """Groups whose credit differs beyond rounding, with the largest difference."""

    def add_step(self, rescored: Sequence[Rescored]) -> None:
        """Add all rollouts of a step, of all environments: they share the counts of member tokens."""
        then = _gradients([gradient_shares(r.then) if r.trained else {} for r in rescored], self._components[0])
        now = _gradients([gradient_shares(r.now) if r.trains else {} for r in rescored], self._components[1])
        for entry, *gradients in zip(rescored, then, now, strict=True):
            sides = entry.then, entry.now
            difference = largest_difference(*sides)
            self._largest_difference = max(self._largest_difference, difference)
            routed_alike = entry.trained or not entry.trains  # else only one side has the weights of the losses
            if routed_alike and not difference <= MAX_ROUNDING:
                group = entry.then.group_id
                self.changed_groups[group] = max(difference, self.changed_groups.get(group, 0.0))
            self._names.append((entry.then.group_id, entry.then.env))
            means = [math.nan if side.mean_advantage is None else side.mean_advantage for side in sides]
            tokens = sum(int(sample.mask.sum()) for sample in entry.then.samples)
            self._rows.append((entry.then.reward, tokens, *means, *map(_absolute_sum, sides), *gradients))

    @property
    def advantages(self) -> np.ndarray:
        """A row per rollout: its mean advantage then and now, NaN without advantages."""
        return self._table[:, 2:4]

    @property
    def _table(self) -> np.ndarray:
        return np.array(self._rows, np.float64).reshape(-1, 8)

    def comparison(self) -> Comparison:
        rewards, tokens = self._table[:, :2].T
        both = ~np.isnan(self.advantages).any(axis=1)
        then, now = self.advantages[both].T
        both_vary = len(then) > 1 and bool(np.ptp(then) and np.ptp(now))
        trains = self._table[:, 6:] > 0
        changed = int((trains[:, 0] != trains[:, 1]).sum())
        envs = np.array([env for _, env in self._names])
        return Comparison(
            groups=len({group for group, _ in self._names}),
            rollouts=len(self._names),
            then=self._side(0),
            now=self._side(1),
            same=self._largest_difference <= MAX_ROUNDING and not changed,
            largest_difference=self._largest_difference,
            changed_sides=changed,
            correlation=float(np.corrcoef(then, now)[0, 1]) if both_vary else None,
            same_sign=float(np.mean(np.sign(then) == np.sign(now))) if both.any() else None,
            by_environment=self._shares((str(name), envs == name) for name in np.unique(envs)),
            by_length=self._shares(split_in_quarters(tokens, "{:,.0f}")),
            by_reward=self._shares(split_by_correctness(rewards)),
        )

    def _side(self, side: int) -> Side:
        tokens = self._table[:, 1]
        advantages, absolute, gradients = (self._table[:, start + side] for start in (2, 4, 6))
        credited = ~np.isnan(advantages)
        has_advantages, values = bool(credited.any()), advantages[credited]
        components = self._components[side]
        total = sum(components.values())
        trained = [group for (group, _), gradient in zip(self._names, gradients, strict=True) if gradient > 0]
        return Side(
            groups_with_signal=len(set(trained)),
            rollouts_that_train=len(trained),
            mean_abs_advantage=float(absolute.sum() / tokens[credited].sum()) if has_advantages else None,
            advantages={name: float(np.quantile(values, at)) for name, at in QUANTILES.items() if has_advantages},
            components={name: value / total for name, value in components.items()} if total else {},
        )

    def _shares(self, parts: Iterable[Part]) -> list[Share]:
        columns = np.column_stack([np.ones(len(self._rows)), self._table[:, [1, 6, 7]]])
        totals = columns.sum(axis=0)
        totals[totals == 0] = 1.0
        return [Share(name, *(columns[inside].sum(axis=0) / totals).tolist()) for name, inside in parts]


def _gradients(shares: Sequence[dict[str, GradientShare]], totals: dict[str, float]) -> list[float]:
    """Return each rollout's gradient, every component divided by its members in this step; adds to `totals`."""
    members: dict[str, int] = {}
    for entry in shares:
        for component, share in entry.items():
            members[component] = members.get(component, 0) + share.members
    for component, count in members.items():
        total = sum(entry[component].total for entry in shares if component in entry)
        totals[component] = totals.get(component, 0.0) + total / count
    return [sum(share.total / members[component] for component, share in entry.items()) for entry in shares]


def split_in_quarters(values: np.ndarray, form: str) -> list[Part]:
    """Split values by size, named by their range, into parts of a quarter, or more if a value is more frequent.

    Equal values stay together, and a value that makes up a quarter has its own part.
    """
    distinct, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    starts, size = [0], 0
    for number, count in enumerate(counts):
        if size and max(size, count) >= len(values) / 4:
            starts.append(number)
            size = 0
        size += count
    part_of = np.searchsorted(starts, places.reshape(-1), side="right") - 1
    parts = []
    for inside in [part_of == number for number in range(len(starts))] if len(distinct) else []:
        low, high = (form.format(end) for end in (values[inside].min(), values[inside].max()))
        parts.append((low if low == high else f"{low} to {high}", inside))
    return parts


def split_by_correctness(rewards: np.ndarray) -> list[Part]:
    """Split by rewards 0, between and 1 if at least half of them are 0 or 1; else in quarters."""
    binary = (rewards == 0) | (rewards == 1)
    if not (((rewards >= 0) & (rewards <= 1)).all() and 2 * binary.sum() >= len(rewards)):
        return split_in_quarters(rewards, "{:.3g}")
    parts = [("0", rewards == 0), ("between", ~binary), ("1", rewards == 1)]
    return [(name, part) for name, part in parts if part.any()]


def largest_difference(then: Rollout, now: Rollout) -> float:
    """Return the largest difference of credit at any token in any stream that is trained on."""
    pairs = zip(then.samples, now.samples, strict=True)
    return max((float(np.abs(_credit(one) - _credit(two)).max(initial=0.0)) for one, two in pairs), default=0.0)


def _credit(sample: Sample) -> np.ndarray:
    """Return what is trained on, one row per stream; missing streams have their default values."""
    sampled, zeros = sample.mask.astype(np.float64), np.zeros(len(sample))
    rl = [sampled * sample.streams.get("rl_weights", sampled), sampled * sample.streams.get("advantages", zeros)]
    others = [sample.streams.get(name, zeros) for name in ("ce_weights", "ref_kl_weights", "ref_logprobs")]
    return np.stack([*rl, *others])


def _absolute_sum(rollout: Rollout) -> float:
    credit = (s.streams["advantages"][s.mask] for s in rollout.samples if "advantages" in s.streams)
    return float(sum(np.abs(values.astype(np.float64)).sum() for values in credit))
