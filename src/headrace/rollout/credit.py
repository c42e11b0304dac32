"""Credit maths in float64: over one group, one value per rollout, and over the tokens of one rollout.

The baseline is the mean over rollouts or the mean over their tokens. Both are linear: center(x + y) = center(x) +
center(y), so each term of a credit may be centered separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.rollout.merge import observed_roles
from headrace.rollout.types import ROLES, Rollout

_TOOL = ROLES.index("tool")
ROUNDING = 1e-12
"""Relative difference up to which two values count as equal."""


def baseline(values: np.ndarray, lengths: np.ndarray | None = None) -> float:
    """Return the mean of the values; with `lengths` that are not all 0, sum(length * value) / sum(length)."""
    values = np.asarray(values, np.float64)
    if lengths is None or not np.any(lengths):
        return float(values.mean())
    lengths = np.asarray(lengths, np.float64)
    return float((lengths * values).sum() / lengths.sum())


def center(values: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
    """Return values minus their baseline; exactly zero if all are equal up to rounding (.1 + .2 equals .3)."""
    values = np.asarray(values, np.float64)
    if values.size == 0 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return np.zeros_like(values)
    return np.asarray(values - baseline(values, lengths))


def standardize(values: np.ndarray, lengths: np.ndarray | None = None, epsilon: float = 1e-6) -> np.ndarray:
    """Return the centered values divided by their population standard deviation plus `epsilon`."""
    return np.asarray(center(values, lengths) / (np.std(np.asarray(values, np.float64)) + epsilon))


def max_rl(rewards: np.ndarray) -> np.ndarray:
    """Return (rewards - mean) / mean; zeros if the mean is not positive beyond rounding."""
    rewards = np.asarray(rewards, np.float64)
    mean = baseline(rewards)
    positive = mean > ROUNDING * np.abs(rewards).max(initial=0.0)
    return center(rewards) / mean if positive else np.zeros_like(rewards)


class Cohort(msgspec.Struct, frozen=True, eq=False):
    """Rewards and token counts of one group: float64 arrays with one value per rollout.

    A tool response in the first prompt of a later sample (because the chat format rewrote history) counts as context
    but not as tool tokens: it may have been counted in the earlier sample already.
    """

    rewards: np.ndarray
    output_tokens: np.ndarray
    """Tokens that the model sampled, over all turns, whether or not they train."""
    context_tokens: np.ndarray
    """All other tokens of the samples: first prompts and observations."""
    tool_tokens: np.ndarray
    """Tokens of tool responses; of all observations if the renderer does not report roles."""
    turns: np.ndarray
    trained_tokens: np.ndarray
    """Sampled tokens that train."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Cohort:
        """Count the tokens of the rollouts of one group."""
        return cls(
            np.array([rollout.reward for rollout in rollouts], np.float64),
            np.array([rollout.completion_tokens for rollout in rollouts], np.float64),
            np.array([sum(np.count_nonzero(~(s.mask | s.sampled)) for s in r.samples) for r in rollouts], np.float64),
            np.array([_count_tool_tokens(rollout) for rollout in rollouts], np.float64),
            np.array([len(rollout.turns) for rollout in rollouts], np.float64),
            np.array([rollout.trained_tokens for rollout in rollouts], np.float64),
        )

    @property
    def pass_rate(self) -> float:
        return float(self.rewards.mean())


def _count_tool_tokens(rollout: Rollout) -> int:
    count = 0
    for sample in rollout.samples:
        roles = observed_roles(sample, rollout.turns)
        if roles is None:
            count += sum(length for _, _, _, length in sample.obs_spans)
        else:
            count += int(np.count_nonzero(roles == _TOOL))
    return count


# -- contrastive self-distillation (rlcsd): arrays hold the trainable tokens of one rollout, samples concatenated ------


def contrast(positive: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """Return per token how much more likely it is after a correct hint than after incorrect ones.

    e = log p_pos - log mean_k p_neg_k, with one row of logprobs for each of the K incorrect hints.
    """
    rows = np.asarray(negatives, np.float64)
    likeliest = rows.max(axis=0)
    mean = likeliest + np.log(np.exp(rows - likeliest).mean(axis=0))
    return np.asarray(np.asarray(positive, np.float64) - mean)


def modulate(
    advantages: np.ndarray, e: np.ndarray, lam: float, tau: float, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages moved by the evidence `e`, and a mask of those that moved.

    x = lam * tanh(e / tau); tokens with |x| > delta become A + x, or 0 where that would flip the sign of A. A = 0
    counts as positive.
    """
    x = lam * np.tanh(np.asarray(e, np.float64) / tau)
    modulated = np.abs(x) > delta
    moved = np.where(advantages >= 0, np.maximum(0.0, advantages + x), np.minimum(0.0, advantages + x))
    return np.where(modulated, moved, advantages), modulated


def fold(advantages: np.ndarray, modulated: np.ndarray, eta: float) -> tuple[np.ndarray, float]:
    """Normalize modulated and other tokens separately for a mean over tokens; return also the largest multiplier.

    Of the L tokens of a rollout, unmodulated ones (U) are multiplied by L/|U|, modulated ones (M) by eta * L/|M|.
    """
    return _weight_sets(advantages, modulated, eta, len(advantages))


def rollout_mean(
    advantages: np.ndarray, modulated: np.ndarray, eta: float, tokens: int, rollouts: int
) -> tuple[np.ndarray, float]:
    """Normalize modulated and other tokens separately for a mean over rollouts; return also the largest multiplier.

    The trainer divides the sum over all tokens by their number N. To obtain the mean over the R rollouts of (mean over
    U + eta * mean over M), tokens in U are multiplied by N / (R * |U|), tokens in M by eta * N / (R * |M|). N is
    `tokens`, the trainable tokens of this environment's rollouts in the batch, and R is `rollouts`, the number of these
    rollouts. A rollout without contrast is all U.
    """
    return _weight_sets(advantages, modulated, eta, tokens / rollouts)


def _weight_sets(advantages: np.ndarray, modulated: np.ndarray, eta: float, share: float) -> tuple[np.ndarray, float]:
    """Give both sets of tokens the same total weight `share`, times `eta` for the modulated set."""
    count = int(np.count_nonzero(modulated))
    rest = len(modulated) - count
    on_rest = share / rest if rest else 0.0
    on_modulated = eta * share / count if count else 0.0
    return advantages * np.where(modulated, on_modulated, on_rest), max(on_rest, on_modulated)
