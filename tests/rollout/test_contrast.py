"""The maths of rlcsd (spec, "rlcsd"; arXiv 2606.11709)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.credit import contrast, fold, modulate, rollout_mean
from tests.rollout.strategies import FIXED

POSITIVE = np.array([-0.1, -1.0, -0.5])
NEGATIVES = np.array([[-0.1, -1.02, -1.0], [-0.2, -0.98, -2.0]])


def test_the_worked_example_of_the_spec():
    e = contrast(POSITIVE, NEGATIVES)
    assert e.tolist() == pytest.approx([0.048751, -0.0002, 0.879885], abs=5e-7)
    moved, modulated = modulate(np.full(3, -0.4), e, lam=0.5, tau=0.02, delta=0.02)
    assert modulated.tolist() == [True, False, True]
    folded, largest = fold(moved, modulated, eta=1.0)
    assert folded.tolist() == pytest.approx([0.0, -1.2, 0.0])
    assert largest == 3.0


def test_evidence_is_a_ratio_of_probabilities_against_their_mean():
    # log .8 - log((.2 + .4 + .6) / 3)
    negatives = np.log([[0.2], [0.4], [0.6]])
    assert contrast(np.log([0.8]), negatives)[0] == pytest.approx(math.log(0.8 / 0.4))


def test_one_negative_hint_is_a_plain_difference():
    assert contrast(np.array([-3.0, -0.5]), np.array([[-1.0, -2.5]])).tolist() == [-2.0, 2.0]


def test_evidence_stays_exact_where_probabilities_underflow():
    # mean of e^-2000 and e^-2001 is e^-2000 * (1 + e^-1) / 2
    e = contrast(np.array([-1999.0]), np.array([[-2000.0], [-2001.0]]))
    assert e[0] == pytest.approx(1 - math.log((1 + math.exp(-1)) / 2))


def test_evidence_does_not_depend_on_the_order_of_the_negatives():
    np.testing.assert_array_equal(contrast(POSITIVE, NEGATIVES), contrast(POSITIVE, NEGATIVES[::-1]))


def test_modulation_by_hand():
    e = np.array([0.02, -0.02, 0.0, 10.0])  # over tau: 1, -1, 0, 500
    x = 0.5 * math.tanh(1)
    moved, modulated = modulate(np.array([1.0, 1.0, 1.0, -2.0]), e, lam=0.5, tau=0.02, delta=0.02)
    assert moved.tolist() == pytest.approx([1 + x, 1 - x, 1.0, -1.5])
    assert modulated.tolist() == [True, True, False, True]


def test_evidence_of_exactly_delta_is_not_above_it():
    _, modulated = modulate(np.ones(2), np.array([-1e9, 1e9]), lam=0.5, tau=0.02, delta=0.5)
    assert not modulated.any()


def test_a_token_without_credit_can_gain_and_not_lose():
    moved, modulated = modulate(np.zeros(2), np.array([1.0, -1.0]), lam=0.5, tau=0.02, delta=0.02)
    assert moved.tolist() == [0.5, 0.0]
    assert modulated.all()


def test_no_strength_changes_nothing():
    advantages = np.array([0.3, -0.7])
    moved, modulated = modulate(advantages, np.array([5.0, 5.0]), lam=0.0, tau=0.02, delta=0.0)
    assert moved.tolist() == advantages.tolist() and not modulated.any()


@FIXED
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-50, 50)), min_size=1, max_size=20),
    st.floats(0, 5),
    st.floats(1e-3, 2),
    st.floats(0, 1),
    st.floats(0, 3),
)
def test_the_sign_never_flips(tokens: list[tuple[float, float]], lam: float, tau: float, delta: float, eta: float):
    advantages, e = np.array(tokens).T
    moved, modulated = modulate(advantages, e, lam, tau, delta)
    for result in (moved, fold(moved, modulated, eta)[0], rollout_mean(moved, modulated, eta, 100, 7)[0]):
        assert np.all(result[advantages >= 0] >= 0)
        assert np.all(result[advantages < 0] <= 0)
    assert np.all(np.abs(moved - advantages) <= lam + 1e-12)
    np.testing.assert_array_equal(moved[~modulated], advantages[~modulated])


def test_folding_gives_each_path_the_whole_rollout():
    # 5 tokens, 2 of them modulated: U times 5/3, M times eta * 5/2
    folded, largest = fold(np.array([3.0, 3, 3, 2, 4]), np.array([False, False, False, True, True]), eta=0.5)
    assert folded.tolist() == pytest.approx([5, 5, 5, 2.5, 5])
    assert largest == pytest.approx(5 / 3)
    # what a mean over the tokens then sees: mean over U + eta * mean over M
    assert folded.mean() == pytest.approx(3 + 0.5 * 3)


def test_a_path_that_has_every_token_is_left_as_it_is():
    nothing, everything = np.zeros(3, bool), np.ones(3, bool)
    assert fold(np.array([1.0, 2, 3]), nothing, eta=0.5)[0].tolist() == [1, 2, 3]
    assert fold(np.array([1.0, 2, 3]), nothing, eta=0.5)[1] == 1.0
    assert fold(np.array([1.0, 2, 3]), everything, eta=0.5)[0].tolist() == [0.5, 1, 1.5]
    assert fold(np.array([1.0, 2, 3]), everything, eta=0.5)[1] == 0.5


def test_under_rollout_mean_a_short_rollout_counts_as_much_as_a_long_one():
    # 2 and 6 tokens: N = 8, R = 2, so N/R = 4. The short one is all U: times 4/2. The long one has |U| = 4, |M| = 2:
    # times 4/4 and eta * 4/2.
    short, _ = rollout_mean(np.array([1.0, 1.0]), np.zeros(2, bool), 0.5, 8, 2)
    assert short.tolist() == [2, 2]
    modulated = np.array([True, True, False, False, False, False])
    long, largest = rollout_mean(np.array([3.0, 5, -1, -1, -1, -1]), modulated, 0.5, 8, 2)
    assert long.tolist() == [3, 5, -1, -1, -1, -1]
    assert largest == 1.0
    # the trainer's sum over N: the mean over rollouts of (mean over U + eta * mean over M)
    assert (short.sum() + long.sum()) / 8 == pytest.approx(((1.0) + (-1 + 0.5 * 4)) / 2)


@FIXED
@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=5))
def test_rollout_mean_is_the_mean_over_rollouts_whatever_their_lengths(rollouts: list[list[tuple[float, bool]]]):
    tokens = sum(map(len, rollouts))
    total, expected = 0.0, 0.0
    for rollout in rollouts:
        advantages, modulated = np.array([a for a, _ in rollout]), np.array([m for _, m in rollout])
        total += rollout_mean(advantages, modulated, 0.7, tokens, len(rollouts))[0].sum()
        expected += advantages[~modulated].mean() if not modulated.all() else 0.0
        expected += 0.7 * advantages[modulated].mean() if modulated.any() else 0.0
    assert total / tokens == pytest.approx(expected / len(rollouts), abs=1e-9)


def test_a_rollout_without_trainable_tokens_stays_empty():
    nothing = np.zeros(0)
    for scaled, largest in (fold(nothing, nothing == 1, 1.0), rollout_mean(nothing, nothing == 1, 1.0, 5, 2)):
        assert len(scaled) == 0 and largest == 0.0
