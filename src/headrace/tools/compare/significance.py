"""Significance tests of the difference between two variants of runs, each with a 95% interval and a p-value.

Corrections for multiple comparisons are left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.tools.common import CONFIDENCE, INTERVAL, bootstrap_means

RESAMPLES = 10_000


class DifferenceEstimate(NamedTuple):
    """The difference of means, second minus first, with its interval."""

    difference: float
    low: float
    high: float
    p: float
    """Two-sided p-value."""


def welch(first: Sequence[float], second: Sequence[float]) -> DifferenceEstimate | None:
    """Welch's t-test, for sides with unequal variances; None if neither side varies.

    t = (m2 - m1) / sqrt(v1/n1 + v2/n2), with the degrees of freedom of Welch and Satterthwaite.
    """
    shares = [variance(values) / len(values) for values in (first, second)]
    if not sum(shares):
        return None
    degrees = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    return _by_t(fmean(second) - fmean(first), math.sqrt(sum(shares)), degrees)


def one_against_several(one: float, several: Sequence[float]) -> DifferenceEstimate | None:
    """Student's t-test of one value that is assumed to have the variance of the others; None if these do not vary.

    t = (m - x) / (s * sqrt(1 + 1/n)), with n - 1 degrees of freedom.
    """
    error = math.sqrt(variance(several) * (1 + 1 / len(several)))
    return _by_t(fmean(several) - one, error, len(several) - 1) if error else None


def bootstrap(first: Sequence[float], second: Sequence[float], *, paired: bool, seed: int = 0) -> DifferenceEstimate:
    """Resample with replacement: percentiles of the difference of means, and twice the smaller tail as p-value.

    With `paired`, both sides have one value for each of the same examples, which are drawn together.
    """
    generator = np.random.default_rng(seed)
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if paired:
        drawn = bootstrap_means(two - one, RESAMPLES, generator)
    else:
        drawn = bootstrap_means(two, RESAMPLES, generator) - bootstrap_means(one, RESAMPLES, generator)
    low, high = np.quantile(drawn, INTERVAL)
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (RESAMPLES + 1))
    return DifferenceEstimate(float(two.mean() - one.mean()), float(low), float(high), p)


def _by_t(difference: float, error: float, degrees: float) -> DifferenceEstimate:
    reach = t_quantile(1 - CONFIDENCE, degrees) * error
    return DifferenceEstimate(difference, difference - reach, difference + reach, t_tails(difference / error, degrees))


def t_tails(t: float, degrees: float) -> float:
    """Return the two-sided tail probability of t under Student's distribution."""
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def t_quantile(p: float, degrees: float) -> float:
    """Return the t whose two-sided tail probability is p."""
    low, high = 0.0, 1.0
    while t_tails(high, degrees) > p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), from its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction would converge slowly
        return 1 - _incomplete_beta(1 - x, b, a)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return scale / (a * _continued(x, a, b))


def _continued(x: float, a: float, b: float) -> float:
    """Return 1 + d1/(1 + d2/(1 + ...)) with 200 terms, evaluated from the innermost."""
    value = 1.0
    for n in range(200, 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d / value
    return value


LAST_STEPS = 20
"""Steps of a bootstrap over steps."""


class VariantValues(NamedTuple):
    """A metric of a variant, with one entry per run."""

    name: str
    ends: Sequence[float]
    """Final values."""
    steps: Sequence[Sequence[float]]
    """Values by step; empty for evaluations."""
    examples: Sequence[Mapping[str, float]]
    """Scores by held-out example; empty if there are none."""


class Difference(msgspec.Struct):
    """A variant minus the baseline."""

    metric: str
    baseline: str
    variant: str
    method: str
    """`welch`, `one_against_several`, `bootstrap_of_examples`, `bootstrap_of_steps` or `none`."""
    difference: float
    low: float | None = None
    """Lower end of the 95% interval; None if no test was possible."""
    high: float | None = None
    p: float | None = None
    note: str = ""
    """The data of the test, and its limits."""


_TestResult = tuple[str, DifferenceEstimate | None, str]
"""Method, estimate (None without a test) and note."""


def compute_difference(metric: str, baseline: VariantValues, variant: VariantValues) -> Difference:
    """Test with the best data available: seeds, else held-out examples, else steps."""
    if len(baseline.ends) == len(variant.ends) == 1:
        method, estimate, note = _test_two_runs(baseline, variant)
    else:
        method, estimate, note = _test_seeds(baseline, variant)
    # The interval is around the mean of the tested values: more steps than the end, or the shared examples.
    of_ends = fmean(variant.ends) - fmean(baseline.ends)
    difference, low, high, p = estimate or (of_ends, None, None, None)
    return Difference(metric, baseline.name, variant.name, method, difference, low, high, p, note)


def _test_seeds(baseline: VariantValues, variant: VariantValues) -> _TestResult:
    first, second = baseline.ends, variant.ends
    counts = f"over {len(first)} and {len(second)} seeds"
    if len(first) > 1 and len(second) > 1:
        method, estimate, note = "welch", welch(first, second), f"Welch's t-test {counts}"
    else:
        method, single = "one_against_several", baseline if len(first) == 1 else variant
        note = f"t-test {counts}; {single.name} has one seed, which is assumed to have the variance of the others"
        if len(first) == 1:
            estimate = one_against_several(first[0], second)
        else:
            swapped = one_against_several(second[0], first)
            estimate = swapped and DifferenceEstimate(-swapped.difference, -swapped.high, -swapped.low, swapped.p)
    if estimate is None:
        return "none", None, "all seeds have the same value, so the variance is unknown"
    return method, estimate, note


def _test_two_runs(baseline: VariantValues, variant: VariantValues) -> _TestResult:
    if baseline.examples and variant.examples:
        return _test_examples(baseline.examples[0], variant.examples[0])
    if not (baseline.steps and variant.steps):
        note = "no test with one evaluation each; use `headrace eval` and --evaluation, or several seeds of each"
        return "none", None, note
    count = min(LAST_STEPS, len(baseline.steps[0]), len(variant.steps[0]))
    if count < 2:
        return "none", None, "no test with one step each; use several seeds of each"
    estimate = bootstrap(baseline.steps[0][-count:], variant.steps[0][-count:], paired=False)
    note = (
        f"bootstrap over the last {count} steps of one run each. Steps of a run are correlated, and another seed may "
        "give another result: a hint, not a proof; use several seeds of each"
    )
    return "bootstrap_of_steps", estimate, note


def _test_examples(first: Mapping[str, float], second: Mapping[str, float]) -> _TestResult:
    shared = [key for key in first if key in second]
    if shared:
        data = f"the {len(shared)} held-out examples of both"
        estimate = bootstrap([first[key] for key in shared], [second[key] for key in shared], paired=True)
    else:
        data = f"{len(first)} and {len(second)} different held-out examples"
        estimate = bootstrap(list(first.values()), list(second.values()), paired=False)
    note = f"bootstrap over {data}. It compares these two models; to compare the settings, use several seeds of each"
    return "bootstrap_of_examples", estimate, note
