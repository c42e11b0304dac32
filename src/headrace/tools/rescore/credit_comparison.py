"""Two ways to credit the same rollouts, in numbers: who has a signal, and whose tokens make the gradient.

Then is what the run trained on, now is what another algorithm makes of it. A rollout's share of the gradient
(`headrace.rollout.gradient_share`) is each loss component over its member tokens in the step, summed over components
and steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.rollout.gradient_share import GradientShare, gradient_shares
from headrace.rollout.types import Rollout, Sample
from headrace.tools.rescore.credit import Rescored

SAME = 1e-6
"""Largest difference between streams of float32 that is rounding, and no difference."""

CAPTION = (
    "Share of the gradient: the sum over trained tokens of |advantage| x weight (rl), weight (ce) or "
    "|reference - logprob| x weight (ref_kl), each loss over its trained tokens in the step. What the trainer's loss "
    "masks, and how far the policy had moved, is not in it."
)

QUANTILES = {"lowest": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "highest": 1.0}


class Side(msgspec.Struct):
    """One of the two ways."""

    groups_with_signal: int
    """Groups of which any rollout trains."""
    rollouts_that_train: int
    """Rollouts that are shipped and make any gradient."""
    mean_abs_advantage: float | None
    """Over the sampled tokens of all credited rollouts; None without advantages."""
    advantages: dict[str, float]
    """Quantiles of a rollout's mean advantage, over all credited rollouts; empty without advantages."""
    components: dict[str, float]
    """Share of the gradient by loss component."""


class Share(msgspec.Struct):
    """Some of the rollouts."""

    name: str
    rollouts: float
    """Their share of all credited rollouts, and below of what these sampled."""
    tokens: float
    then: float
    """Their share of the gradient."""
    now: float


class Comparison(msgspec.Struct):
    groups: int
    rollouts: int
    then: Side
    now: Side
    same: bool
    """Whether every token has the same credit, and the same rollouts train."""
    largest_difference: float
    """Between any two values of one stream at one token."""
    changed_sides: int
    """Rollouts that train on one side alone."""
    correlation: float | None
    """Of the rollouts' mean advantages; None where one side has none, or they are all equal."""
    same_sign: float | None
    """Share of rollouts whose mean advantage is above, at or below zero on both sides."""
    by_environment: list[Share]
    by_length: list[Share]
    by_reward: list[Share]

    @property
    def shares(self) -> dict[str, list[Share]]:
        """By what the rollouts are parted by, in words."""
        return {"environment": self.by_environment, "sampled tokens": self.by_length, "reward": self.by_reward}


class _Entry(msgspec.Struct):
    """What is kept of a rollout."""

    group: str
    env: str
    reward: float
    tokens: int
    advantages: tuple[float, float]
    """Then and now; NaN where there are none. The same in what follows."""
    absolute: tuple[float, float]
    """Sum of |A| over sampled tokens."""
    gradients: tuple[float, float]


class Collector:
    """Takes rescored rollouts step by step, and keeps a few numbers of each."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._components: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._largest = 0.0
        self._changed = 0

    def add_step(self, rescored: Sequence[Rescored]) -> None:
        """All that one step brought, whatever its environment: it shares its counts of member tokens."""
        then = self._gradients([gradient_shares(r.then) if r.trained else {} for r in rescored], self._components[0])
        now = self._gradients([gradient_shares(r.now) if r.trains else {} for r in rescored], self._components[1])
        for entry, *gradients in zip(rescored, then, now, strict=True):
            self._largest = max(self._largest, largest_difference(entry.then, entry.now))
            self._changed += (gradients[0] > 0) != (gradients[1] > 0)
            sides = (entry.then, entry.now)
            means = [math.nan if side.mean_advantage is None else side.mean_advantage for side in sides]
            self._entries.append(
                _Entry(
                    entry.then.group_id,
                    entry.then.env,
                    entry.then.reward,
                    sum(int(sample.mask.sum()) for sample in entry.then.samples),
                    (means[0], means[1]),
                    (_absolute(sides[0]), _absolute(sides[1])),
                    (gradients[0], gradients[1]),
                )
            )

    @property
    def advantages(self) -> np.ndarray:
        """A row per rollout: its mean advantage then and now, NaN where there is none."""
        return np.array([entry.advantages for entry in self._entries]).reshape(-1, 2)

    def comparison(self) -> Comparison:
        tokens = np.array([entry.tokens for entry in self._entries], np.int64)
        rewards = np.array([entry.reward for entry in self._entries])
        then, now = self.advantages.T
        known = ~(np.isnan(then) | np.isnan(now))
        envs = [(name, np.array([e.env == name for e in self._entries])) for name in _names(self._entries)]
        return Comparison(
            groups=len({entry.group for entry in self._entries}),
            rollouts=len(self._entries),
            then=self._side(0),
            now=self._side(1),
            same=self._largest <= SAME and not self._changed,
            largest_difference=self._largest,
            changed_sides=self._changed,
            correlation=_correlation(then[known], now[known]),
            same_sign=float(np.mean(np.sign(then[known]) == np.sign(now[known]))) if known.any() else None,
            by_environment=self._shares(envs),
            by_length=self._shares(quarters(tokens, "{:,.0f}")),
            by_reward=self._shares(by_correctness(rewards)),
        )

    def _gradients(self, found: Sequence[dict[str, GradientShare]], totals: dict[str, float]) -> list[float]:
        """Each rollout's pull, every component over its members in this step."""
        members: dict[str, int] = {}
        for entry in found:
            for component, pull in entry.items():
                members[component] = members.get(component, 0) + pull.members
        for component, count in members.items():
            pulled = sum(entry[component].total for entry in found if component in entry)
            totals[component] = totals.get(component, 0.0) + pulled / count
        return [sum(pull.total / members[component] for component, pull in entry.items()) for entry in found]

    def _side(self, side: Literal[0, 1]) -> Side:
        entries = self._entries
        advantages = self.advantages[:, side]
        known = advantages[~np.isnan(advantages)]
        tokens = sum(entry.tokens for entry in entries if not math.isnan(entry.advantages[side]))
        trains = [entry for entry in entries if entry.gradients[side] > 0]
        components = self._components[side]
        total = sum(components.values())
        return Side(
            groups_with_signal=len({entry.group for entry in trains}),
            rollouts_that_train=len(trains),
            mean_abs_advantage=sum(entry.absolute[side] for entry in entries) / tokens if len(known) else None,
            advantages={name: float(np.quantile(known, at)) for name, at in QUANTILES.items()} if len(known) else {},
            components={name: value / total for name, value in components.items()} if total else {},
        )

    def _shares(self, parts: Iterable[tuple[str, np.ndarray]]) -> list[Share]:
        columns = np.array([[1, entry.tokens, *entry.gradients] for entry in self._entries], np.float64).reshape(-1, 4)
        totals = columns.sum(axis=0)
        totals[totals == 0] = 1.0  # nothing of nothing is nothing
        return [Share(name, *(columns[inside].sum(axis=0) / totals).tolist()) for name, inside in parts]


def quarters(values: np.ndarray, form: str) -> list[tuple[str, np.ndarray]]:
    """Parts from the smallest to the largest, by their range, a quarter each or more where a value is as frequent.

    Equal values stay together, and one that makes a quarter by itself has a part of its own.
    """
    distinct, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    starts, size = [0], 0
    for number, count in enumerate(counts):
        if size and max(size, count) >= len(values) / 4:
            starts.append(number)
            size = 0
        size += count
    part = np.searchsorted(starts, places.reshape(-1), side="right") - 1
    parts = [part == number for number in range(len(starts))] if len(distinct) else []
    return [(_range(values[inside], form), inside) for inside in parts]


def by_correctness(rewards: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Wrong, partly right and right, where rewards mostly say that; else by quarters."""
    inside = (rewards >= 0) & (rewards <= 1)
    plain = (rewards == 0) | (rewards == 1)
    if not (inside.all() and 2 * plain.sum() >= len(rewards)):
        return quarters(rewards, "{:.3g}")
    parts = [("0", rewards == 0), ("between", ~plain), ("1", rewards == 1)]
    return [(name, part) for name, part in parts if part.any()]


def largest_difference(then: Rollout, now: Rollout) -> float:
    """Between the credit of two copies of a rollout, at any token and in any stream that is trained on."""
    pairs = zip(then.samples, now.samples, strict=True)
    return max((float(np.abs(_credit(one) - _credit(two)).max(initial=0.0)) for one, two in pairs), default=0.0)


def _credit(sample: Sample) -> np.ndarray:
    """What is trained on, one row per stream; one that is not there as what it means then."""
    sampled, nothing = sample.mask.astype(np.float64), np.zeros(len(sample))
    rl = [sampled * sample.streams.get("rl_weights", sampled), sampled * sample.streams.get("advantages", nothing)]
    others = [sample.streams.get(name, nothing) for name in ("ce_weights", "ref_kl_weights", "ref_logprobs")]
    return np.stack([*rl, *others])


def _absolute(rollout: Rollout) -> float:
    credit = (s.streams["advantages"][s.mask] for s in rollout.samples if "advantages" in s.streams)
    return float(sum(np.abs(values.astype(np.float64)).sum() for values in credit))


def _correlation(then: np.ndarray, now: np.ndarray) -> float | None:
    if len(then) < 2 or not (np.ptp(then) and np.ptp(now)):
        return None
    return float(np.corrcoef(then, now)[0, 1])


def _names(entries: Sequence[_Entry]) -> list[str]:
    return sorted({entry.env for entry in entries})


def _range(values: np.ndarray, form: str) -> str:
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"
