"""What length costs."""

import numpy as np
import pytest

from headrace.algorithms.length_penalties.efficiency import efficiency_bonus
from headrace.algorithms.length_penalties.linear import linear, price_by_group_max, price_by_seq_len
from headrace.algorithms.length_penalties.overlong import overlong
from headrace.rollout.cohort import Cohort


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def cohort(output: list[float], context: list[float], turns: list[float]) -> Cohort:
    nothing = np.zeros(len(output))
    return Cohort(nothing, floats(*output), floats(*context), nothing, floats(*turns))


def test_a_price_by_seq_len_grows_with_what_the_model_wrote():
    # .25 * 100 / 1000 and .25 * 200 / 1000
    price = price_by_seq_len(cohort([100, 200], [5, 7], [1, 2]), coef=0.25, seq_len=1000)
    assert price.tolist() == [0.025, 0.05]


def test_a_price_by_group_max_weighs_shares_of_the_largest():
    # .25 * 50/100 + .1 * 30/30 + .1 * 1/4 = .125 + .1 + .025; and .25 + .1 * 10/30 + .1
    price = price_by_group_max(cohort([50, 100], [30, 10], [1, 4]), 0.25, 0.1, 0.1)
    assert price == pytest.approx([0.25, 0.35 + 0.1 / 3])


def test_a_largest_of_zero_costs_nothing():
    assert price_by_group_max(cohort([0, 0], [10, 5], [0, 0]), 0.25, 0.1, 0.1) == pytest.approx([0.1, 0.05])


def test_a_linear_penalty_is_the_price_times_the_pass_rate():
    assert linear(floats(0.1, 0.2), floats(1, 0), gated=False).tolist() == [0.05, 0.1]


def test_a_gate_lets_only_the_correct_pay():
    # pass rate (1 + .5 + 0 + 1) / 4 = .625: only those at exactly 1 pay
    assert linear(floats(0.8, 0.8, 0.8, 1.6), floats(1, 0.5, 0, 1), gated=True).tolist() == [0.5, 0, 0, 1]


@pytest.mark.parametrize("gated", [False, True])
def test_a_negative_pass_rate_costs_nothing(gated: bool):
    assert linear(floats(0.1, 0.2), floats(1, -2), gated=gated).tolist() == [0, 0]


def test_overlong_starts_before_the_limit_and_ends_at_one():
    # max 100, cache 20: free up to 80, half way at 90
    tokens = floats(0, 79, 80, 85, 90, 100, 500)
    assert overlong(tokens, 100, 20).tolist() == [0, 0, 0, 0.25, 0.5, 1, 1]


def test_the_correct_earn_what_they_save_below_the_mean_of_the_correct():
    # mean cost of the correct (10 + 30 + 20) / 3 = 20: the first saves half
    assert efficiency_bonus(floats(1, 1, 0, 1), floats(10, 30, 20, 20)).tolist() == [0.5, 0, 0, 0]


def test_correct_rollouts_have_the_largest_reward():
    # .4 is the best: mean cost 15, a third saved, of .4
    assert efficiency_bonus(floats(0.4, 0.4, 0.3), floats(10, 20, 1)) == pytest.approx([0.4 / 3, 0, 0])


def test_what_costs_nothing_doubles_the_reward():
    assert efficiency_bonus(floats(1, 1), floats(0, 10)).tolist() == [1, 0]


@pytest.mark.parametrize("rewards", [(0, 0), (0, -1), (-1, -2)])
def test_without_a_positive_reward_there_is_no_bonus(rewards: tuple[float, float]):
    assert efficiency_bonus(floats(*rewards), floats(10, 20)).tolist() == [0, 0]


def test_without_a_cost_of_the_correct_there_is_no_bonus():
    assert efficiency_bonus(floats(1, 1, 0), floats(0, 0, 9)).tolist() == [0, 0, 0]
