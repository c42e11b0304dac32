"""The tests of significance against closed forms, values of printed tables and hand-worked examples."""

from __future__ import annotations

import math

import pytest

from headrace.tools.compare.significance import (
    bootstrap,
    one_against_several,
    t_quantile,
    t_tails,
    welch,
)


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 2.5, 40.0])
def test_the_tails_of_t_are_those_of_the_closed_forms(t: float):
    # One degree of freedom is Cauchy's distribution; two and four have elementary ones.
    assert t_tails(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-12)
    assert t_tails(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
    z = t * t / (1 + t * t / 4)
    assert t_tails(t, 4) == pytest.approx(1 - 2 * (3 / 8) * math.sqrt(z) * (1 - z / 12), abs=1e-12)


def test_the_tails_are_the_normal_ones_where_degrees_are_many():
    assert t_tails(1.96, 1e6) == pytest.approx(math.erfc(1.96 / math.sqrt(2)), abs=1e-5)


@pytest.mark.parametrize(("degrees", "printed"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (30, 2.042)])
def test_the_quantiles_are_those_of_a_printed_table(degrees: int, printed: float):
    assert t_quantile(0.05, degrees) == pytest.approx(printed, abs=5e-4)


def test_welch_by_hand():
    # Means 2 and 5; variances 1 and 20/3; (1/3 + 5/3) = 2; t = 3 / sqrt 2; 4 / ((1/9)/2 + (25/9)/3) = 216/53 degrees.
    estimate = welch([1, 2, 3], [2, 4, 6, 8])
    assert estimate is not None
    assert estimate.difference == 3
    assert estimate.p == pytest.approx(t_tails(3 / math.sqrt(2), 216 / 53))
    assert 0.09 < estimate.p < 0.11  # between the table's 10% (2.132) and 5% (2.776) of four degrees, near the first
    assert estimate.high - 3 == pytest.approx(t_quantile(0.05, 216 / 53) * math.sqrt(2))
    assert estimate.low + estimate.high == pytest.approx(6)


def test_welch_with_two_equal_seeds_a_side_has_two_degrees_of_freedom():
    # Variances 0.02 each, so that t = 1 / sqrt(0.02), and p = 1 - t / sqrt(2 + t²) with t² = 50.
    estimate = welch([0.0, 0.2], [1.0, 1.2])
    assert estimate is not None
    assert estimate.p == pytest.approx(1 - math.sqrt(50 / 52))


def test_seeds_that_do_not_vary_have_no_test():
    assert welch([0.1, 0.1], [0.3, 0.3]) is None
    assert one_against_several(0.1, [0.3, 0.3, 0.3]) is None


def test_one_side_that_does_not_vary_leaves_the_degrees_of_the_other():
    # v1 = 0, v2 = 1: t = 2 / sqrt(1/3), two degrees.
    estimate = welch([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    assert estimate is not None
    assert estimate.p == pytest.approx(1 - math.sqrt(12 / 14))


def test_one_run_against_several_by_hand():
    # m = 2, s = 1, n = 3: t = 2 / sqrt(4/3) = sqrt 3, two degrees: p = 1 - sqrt(3/5).
    estimate = one_against_several(0.0, [1.0, 2.0, 3.0])
    assert estimate is not None
    assert (estimate.difference, estimate.p) == (2.0, pytest.approx(1 - math.sqrt(3 / 5)))


def test_the_bootstrap_of_a_constant_difference_is_that_difference():
    values = [0.0, 1.0, 0.5, 0.25]
    estimate = bootstrap(values, [value + 0.125 for value in values], paired=True)
    assert estimate[:3] == (0.125, 0.125, 0.125)
    assert estimate.p == pytest.approx(2 / 10_001)


def test_the_bootstrap_of_equal_examples_finds_nothing():
    values = [0.0, 1.0] * 20
    assert bootstrap(values, values, paired=True) == (0.0, 0.0, 0.0, 1.0)
    unpaired = bootstrap(values, values, paired=False)
    assert unpaired.p > 0.9
    assert unpaired.low < 0 < unpaired.high


def test_the_interval_of_the_bootstrap_is_about_two_standard_errors():
    # 400 examples that are half right: the standard error of a mean is 0.5 / 20 = 0.025.
    estimate = bootstrap([0.0] * 400, [0.0, 1.0] * 200, paired=True)
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_the_bootstrap_gives_the_same_numbers_again():
    first, second = [0.1, 0.4, 0.2, 0.9], [0.3, 0.8, 0.1]
    assert bootstrap(first, second, paired=False) == bootstrap(first, second, paired=False)
