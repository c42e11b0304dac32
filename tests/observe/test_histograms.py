"""Histograms of a step: bins, and the text in which a record has them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.histograms import BOUNDS, Counts, count, decode


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_rise_and_a_value_on_a_bound_is_in_the_bin_below(name: str) -> None:
    bounds = BOUNDS[name]
    assert np.all(np.diff(bounds) > 0)
    assert count(name, bounds).counts.tolist() == [*[1] * len(bounds), 0]


@pytest.mark.parametrize("name", BOUNDS)
@given(values=st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_a_text_has_every_count(name: str, values: list[float]) -> None:
    counted = count(name, values)
    read = decode(name, counted.encode())
    assert read.counts.tolist() == counted.counts.tolist() and read.counts.sum() == len(values)
    assert read.total == pytest.approx(sum(values), rel=1e-5, abs=1e-3)


def test_values_that_are_not_finite_are_left_out() -> None:
    assert count("ratio", [math.nan, math.inf, 1.0]).counts.sum() == 1


def test_a_damaged_text_is_refused() -> None:
    for text in ("", "1 2", "1 0 a", "1 80 1,1,1,1", f"0 0 {','.join(['1'] * 90)}"):
        with pytest.raises(ValueError):
            decode("advantages", text)


def test_buckets_have_finite_edges_around_what_was_counted() -> None:
    counts, edges = Counts(np.eye(len(BOUNDS["ratio"]) + 1, dtype=int)[-1], 1.0).buckets("ratio")
    assert counts.tolist() == [1] and np.isfinite(edges).all() and len(edges) == 2


def test_a_step_takes_few_bytes() -> None:
    """Three histograms of a large step: less than the numbers of the same step, which are several kilobytes."""
    generator = np.random.default_rng(0)
    texts = [
        count("advantages", generator.normal(size=2048)).encode(),
        count("decode_len", generator.lognormal(6, 1, size=2048)).encode(),
        count("ratio", np.exp(generator.normal(0, 0.01, size=1_000_000))).encode(),
    ]
    assert sum(map(len, texts)) < 600
