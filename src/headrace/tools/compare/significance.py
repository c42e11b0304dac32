"""How sure a difference between two kinds of runs is: pure functions of the numbers, each with a 95% interval and a p.

Left out on purpose: corrections for many comparisons (the caller says how many there are) and anything that wants a
library of statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
AT_ONCE = 2_000_000
"""Numbers drawn at once: bounds the memory of a bootstrap over many examples."""


class Estimate(NamedTuple):
    """The second minus the first."""

    difference: float
    low: float
    high: float
    p: float
    """Two-sided: how often a difference this large would come by chance if there were none."""


def welch(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Welch's t-test, which lets each side have a spread of its own; None where neither side varies.

    t = (m2 - m1) / sqrt(v1/n1 + v2/n2), with the degrees of freedom of Welch and Satterthwaite.
    """
    shares = [_variance(values) / len(values) for values in (first, second)]
    if not sum(shares):
        return None
    degrees = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    return _by_t(_mean(second) - _mean(first), math.sqrt(sum(shares)), degrees)


def one_against_several(one: float, several: Sequence[float]) -> Estimate | None:
    """Student's t-test of a single value, which is taken to vary as the others do; None where these do not.

    t = (m - x) / (s * sqrt(1 + 1/n)), with n - 1 degrees of freedom.
    """
    error = math.sqrt(_variance(several) * (1 + 1 / len(several)))
    return _by_t(_mean(several) - one, error, len(several) - 1) if error else None


def bootstrap(first: Sequence[float], second: Sequence[float], *, paired: bool, seed: int = 0) -> Estimate:
    """Draw the values again with replacement: percentiles of the difference of means, and twice the smaller tail.

    `paired`: the two have one value each for the same examples, which are then drawn together.
    """
    generator = np.random.default_rng(seed)
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if paired:
        drawn = _means_of_draws(two - one, generator)
    else:
        drawn = _means_of_draws(two, generator) - _means_of_draws(one, generator)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (RESAMPLES + 1))
    return Estimate(float(two.mean() - one.mean()), float(low), float(high), p)


def _means_of_draws(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    parts, left = [], RESAMPLES
    while left:
        count = min(left, max(1, AT_ONCE // len(values)))
        parts.append(values[generator.integers(len(values), size=(count, len(values)))].mean(axis=1))
        left -= count
    return np.concatenate(parts)


def _by_t(difference: float, error: float, degrees: float) -> Estimate:
    reach = t_quantile(1 - CONFIDENCE, degrees) * error
    return Estimate(difference, difference - reach, difference + reach, t_tails(difference / error, degrees))


def t_tails(t: float, degrees: float) -> float:
    """The probability of a value beyond t on either side under Student's distribution."""
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def t_quantile(p: float, degrees: float) -> float:
    """The t whose two tails have the probability p."""
    low, high = 0.0, 1.0
    while t_tails(high, degrees) > p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction would converge slowly, the other side does not
        return 1 - _incomplete_beta(1 - x, b, a)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return scale / (a * _continued(x, a, b))


def _continued(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), from the innermost term outward; the terms vanish long before the last."""
    value = 1.0
    for n in range(200, 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d / value
    return value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Over n - 1; 0 where all are equal."""
    if max(values) == min(values):
        return 0.0
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
