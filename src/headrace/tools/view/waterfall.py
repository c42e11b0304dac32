"""Where the credit of a rollout comes from: reward parts, reward, baseline, terms, tokens, weights, gradient.

    reward    the parts of the reward add up to it
    credit    each term of the algorithm: its value, minus its baseline, scaled; together the advantage of the rollout
    tokens    what was changed per token; the mean over the trained tokens is that of the recorded stream
    weight    the sum of a component's weights over the tokens that it trains in the whole step
    gradient  the rollout's share of the step's gradient, by component; those of all rollouts add up to 1

The algorithm explains its own credit (`Algorithm.credit_terms`), so there is one source of truth. What it does not
explain, as a user's function that is not imported here, is a bar of its own: the bars always add up. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.algorithms.base import CreditTerm
from headrace.rollout.routing import GradientShare, gradient_shares
from headrace.rollout.types import Rollout

ROUNDING = 1e-6
"""Relative size of what is rounding: streams are stored in float32."""
LOSS_FORMULAS = {
    "rl": "|advantage| * weight / tokens that rl trains in the step",
    "ce": "weight / tokens that ce trains in the step",
    "ref_kl": "|reference logprob - logprob| * weight / tokens that ref_kl trains in the step",
    "k2": "|logprob - reference logprob| * weight / tokens that k2 trains in the step",
    "k3": "|exp(reference logprob - logprob) - 1| * weight / tokens that k3 trains in the step",
}
LOSS_KEYS = {"rl": "trainer.loss", "ref_kl": "trainer.ref_kl"}
Stage = Literal["reward", "credit", "tokens", "weight", "gradient"]


class Bar(msgspec.Struct):
    """One bar of the chart."""

    stage: Stage
    kind: Literal["delta", "total"]
    name: str
    value: float
    total: float
    """The running sum of its stage after it."""
    formula: str = ""
    key: str = ""
    """The configuration key that chooses it."""


class Waterfall(msgspec.Struct):
    bars: list[Bar]
    unexplained: float
    """The part of the advantage that no term explains; 0 up to rounding."""

    def add(self, stage: Stage, name: str, value: float, formula: str = "", key: str = "") -> None:
        """Append a change; the first of a stage begins at 0, or at the total that was carried over."""
        before = self.bars[-1].total if self.bars and self.bars[-1].stage == stage else 0.0
        self.bars.append(Bar(stage, "delta", name, value, before + value, formula, key))

    def carry(self, stage: Stage, name: str, value: float, formula: str = "", key: str = "") -> None:
        """Append a total."""
        self.bars.append(Bar(stage, "total", name, value, value, formula, key))


def explain(
    rollout: Rollout,
    index: int,
    terms: Sequence[CreditTerm],
    algorithm: str,
    section: str = "orchestrator.algo",
    step: dict[str, GradientShare] | None = None,
) -> Waterfall:
    """Return the waterfall of the `index`-th rollout of its group.

    `section` is the configuration key of the algorithm; `step` are the shares of the whole step by component.
    """
    result = Waterfall([], 0.0)
    _add_reward(result, rollout)
    _add_credit(result, rollout, index, terms, algorithm, section)
    _add_gradient(result, rollout, section, step)
    return result


def _add_reward(result: Waterfall, rollout: Rollout) -> None:
    if not np.isfinite(rollout.reward):
        return
    parts = sum(rollout.rewards.values())
    for name, value in rollout.rewards.items():
        result.add("reward", name, value, "a part of the reward", "rewards")
    if abs(rollout.reward - parts) > ROUNDING * max(abs(parts), abs(rollout.reward)):
        result.add("reward", "other parts", rollout.reward - parts, "reward - sum of its named parts")
    result.carry("reward", "reward", rollout.reward, "sum of its parts")


def _add_credit(
    result: Waterfall, rollout: Rollout, index: int, terms: Sequence[CreditTerm], algorithm: str, section: str
) -> None:
    recorded = rollout.mean_advantage
    if recorded is None:
        return
    for term in terms:
        key = f"{section}.{term.key}" if term.key else f"{section}.type"
        raw, part = float(term.raw[index]), float(term.values[index])
        baseline = float(np.broadcast_to(term.baseline, term.raw.shape)[index])
        charged = raw - rollout.reward if term is terms[0] else 0.0
        result.add("credit", term.name, raw - charged, term.formula, key)
        if abs(charged) > ROUNDING * max(abs(raw), abs(rollout.reward)):
            result.add("credit", "KL penalty in the reward", charged, "-coef * estimated KL", f"{section}.kl")
        if baseline:
            result.add("credit", f"baseline of the {term.name}", -baseline, term.formula, key)
        if abs(scaled := part - (raw - baseline)) > ROUNDING * max(abs(part), abs(raw)):
            result.add("credit", f"scale of the {term.name}", scaled, term.formula, key)
    explained = float(sum(term.values[index] for term in terms))
    size = max([abs(recorded), *(float(np.abs(term.raw).max()) for term in terms)])
    if not terms:
        result.add("credit", f"credit of {algorithm}", recorded, "not explained by its terms", f"{section}.type")
        result.unexplained = recorded
        explained = recorded
    result.carry("credit", "advantage", explained, "sum of the terms", f"{section}.type")
    if abs(changed := recorded - explained) > ROUNDING * size:
        result.carry("tokens", "advantage of the rollout", explained)
        result.add("tokens", "changes per token", changed, f"what {algorithm} changed token by token", section)
        result.unexplained = changed
    result.carry("tokens", "mean of its tokens", recorded, "mean of `advantages` over the trained tokens")


def _add_gradient(result: Waterfall, rollout: Rollout, section: str, step: dict[str, GradientShare] | None) -> None:
    if step is None:
        return
    shares = component_shares(rollout, step)
    weights = component_weights(rollout)
    for name in shares:
        value, formula = weights[name] / step[name].members, "sum of its weights / tokens trained in the step"
        result.carry("weight", f"weight in {name}", value, formula, LOSS_KEYS.get(name, section))
    for name, share in shares.items():
        result.add("gradient", name, share, LOSS_FORMULAS.get(name, ""), LOSS_KEYS.get(name, section))
    result.carry("gradient", "share of the step's gradient", sum(shares.values()), "sum over the components")


def component_shares(rollout: Rollout, step: dict[str, GradientShare]) -> dict[str, float]:
    """Return the rollout's share of the step's gradient by component, at the policy that sampled it."""
    whole = sum(share.total / share.members for share in step.values() if share.members)
    return {
        name: share.total / step[name].members / whole if whole > 0 else 0.0
        for name, share in gradient_shares(rollout).items()
    }


def component_weights(rollout: Rollout) -> dict[str, float]:
    """Return the sum of the weights of the tokens that each component trains."""
    totals = {"rl": 0.0}
    for sample in rollout.samples:
        rl = sample.streams.get("rl_weights", np.ones(len(sample))) * sample.mask
        named = {n.removesuffix("_weights"): w for n, w in sample.streams.items() if n.endswith("_weights")}
        for name, weights in {**named, "rl": rl}.items():
            totals[name] = totals.get(name, 0.0) + float(weights[1:].sum())
    return totals


def stream_summary(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the range of each per-token stream over the sampled tokens."""
    names = dict.fromkeys(n for sample in rollout.samples for n, v in sample.streams.items() if v.ndim == 1)
    entries = []
    for name in names:
        values = [s.streams[name][s.mask] for s in rollout.samples if name in s.streams]
        joined = np.concatenate(values).astype(np.float64) if values else np.empty(0)
        if len(joined) and np.isfinite(joined).all():
            ends = {"min": float(joined.min()), "mean": float(joined.mean()), "max": float(joined.max())}
            entries.append({"name": name, **ends})
    return entries
