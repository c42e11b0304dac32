"""The maths of contrastive self-distillation: per-token evidence, and how it changes a rollout's advantages.

All arrays are float64 and hold the trainable tokens of one rollout, its samples concatenated. The algorithm (`rlcsd`)
chooses the hints and the model that scores the tokens.
"""

from __future__ import annotations

import numpy as np


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
    """Normalize modulated and other tokens apart, under a mean over tokens; return also the largest multiplier.

    Of the L tokens of a rollout, unmodulated ones (U) are multiplied by L/|U|, modulated ones (M) by eta * L/|M|.
    """
    return _weight_apart(advantages, modulated, eta, len(advantages))


def rollout_mean(
    advantages: np.ndarray, modulated: np.ndarray, eta: float, tokens: int, rollouts: int
) -> tuple[np.ndarray, float]:
    """Normalize as `fold` does, but weight every rollout equally; return also the largest multiplier.

    The trainer divides the sum over all tokens by their number N. To obtain the mean over the R rollouts of (mean over
    U + eta * mean over M), tokens in U are multiplied by N / (R * |U|), tokens in M by eta * N / (R * |M|). N is
    `tokens`, the trainable tokens of this environment's rollouts in the batch, and R is `rollouts`, the number of these
    rollouts. A rollout without contrast is all U.
    """
    return _weight_apart(advantages, modulated, eta, tokens / rollouts)


def _weight_apart(advantages: np.ndarray, modulated: np.ndarray, eta: float, share: float) -> tuple[np.ndarray, float]:
    """Give both sets of tokens the same total weight `share`, times `eta` for the modulated set."""
    count = int(np.count_nonzero(modulated))
    rest = len(modulated) - count
    on_rest = share / rest if rest else 0.0
    on_modulated = eta * share / count if count else 0.0
    return advantages * np.where(modulated, on_modulated, on_rest), max(on_rest, on_modulated)
