"""The maths of contrastive self-distillation: per-token evidence, and what it does to a rollout's credit.

All arrays are float64 and hold the trainable tokens of one rollout, its samples end to end. Which hints are given, and
who finds the tokens how likely, is not decided here.
"""

from __future__ import annotations

import numpy as np


def contrast(positive: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """How much more likely each token is after a correct hint than after incorrect ones.

    e = log p_pos - log mean_k p_neg_k, with one row of logprobs for each of the K incorrect hints.
    """
    rows = np.asarray(negatives, np.float64)
    likeliest = rows.max(axis=0)
    mean = likeliest + np.log(np.exp(rows - likeliest).mean(axis=0))
    return np.asarray(np.asarray(positive, np.float64) - mean)


def modulate(
    advantages: np.ndarray, e: np.ndarray, lam: float, tau: float, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    """The advantages moved by the evidence, and which of them were.

    x = lam * tanh(e / tau); tokens with |x| > delta become A + x, or 0 where that would turn the sign of A. A token
    without credit counts as positive.
    """
    x = lam * np.tanh(np.asarray(e, np.float64) / tau)
    modulated = np.abs(x) > delta
    moved = np.where(advantages >= 0, np.maximum(0.0, advantages + x), np.minimum(0.0, advantages + x))
    return np.where(modulated, moved, advantages), modulated


def fold(advantages: np.ndarray, modulated: np.ndarray, eta: float) -> tuple[np.ndarray, float]:
    """Each path on its own, under a mean over tokens; with the largest multiplier.

    Of the L tokens of a rollout those that were not modulated (U) get L/|U|, those that were (M) get eta * L/|M|.
    """
    return _weighed(advantages, modulated, eta, len(advantages))


def rollout_mean(
    advantages: np.ndarray, modulated: np.ndarray, eta: float, tokens: int, rollouts: int
) -> tuple[np.ndarray, float]:
    """Each path on its own, and every rollout counts equally; with the largest multiplier.

    The trainer divides the sum over all tokens by their number N. So that what is left of it is, over the R rollouts,
    the mean of (mean over U + eta * mean over M), tokens on U get N / (R * |U|), those on M eta * N / (R * |M|). N is
    `tokens`, the trainable tokens of this environment's rollouts in the batch, and R is `rollouts`, the number of these
    rollouts. A rollout without contrast is all U.
    """
    return _weighed(advantages, modulated, eta, tokens / rollouts)


def _weighed(advantages: np.ndarray, modulated: np.ndarray, eta: float, share: float) -> tuple[np.ndarray, float]:
    """Give each path that has tokens the same share, times `eta` for the modulated one."""
    count = int(np.count_nonzero(modulated))
    rest = len(modulated) - count
    on_rest = share / rest if rest else 0.0
    on_modulated = eta * share / count if count else 0.0
    return advantages * np.where(modulated, on_modulated, on_rest), max(on_rest, on_modulated)
