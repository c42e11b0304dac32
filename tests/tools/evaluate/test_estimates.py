"""Intervals against numbers worked by hand."""

import pytest

from headrace.tools.evaluate.results import Estimate, estimate


def test_of_two_examples_that_differ_the_interval_is_everything():
    # The mean of a resample is 0 in a quarter of the cases and 1 in another: both are within 95%.
    assert estimate([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0)


def test_examples_that_agree_leave_no_doubt():
    assert estimate([0.25] * 7) == Estimate(0.25, 0.25, 0.25)
    assert estimate([3.0]) == Estimate(3.0, 3.0, 3.0)


def test_the_interval_of_many_examples_is_that_of_the_normal_distribution_and_has_a_seed():
    values = [0.0] * 200 + [1.0] * 200
    found = estimate(values)
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.008)  # standard error sqrt(1/4 / 400)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.008)
    assert estimate(values) == found
    assert estimate(values, seed=1) != found
