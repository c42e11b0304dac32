"""What length costs."""

import numpy as np
import pytest

from headrace.algorithms.base import Tally
from headrace.algorithms.length_penalties import LinearPenaltyConfig, OverlongPenaltyConfig, efficiency_bonus
from headrace.rollout.credit import Cohort


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def cohort(output: list[float], rewards: list[float], context: float = 0, turns: list[float] | None = None) -> Cohort:
    nothing = np.zeros(len(output))
    return Cohort(
        floats(*rewards), floats(*output), nothing + context, nothing, floats(*(turns or nothing)), floats(*output)
    )


def test_a_linear_penalty_grows_with_what_the_model_wrote_and_with_the_pass_rate():
    # .25 * 100 / 1000 and .25 * 200 / 1000, times .5
    penalty = LinearPenaltyConfig(coef=0.25).term(cohort([100, 200], [1, 0]), Tally(), 1000)
    assert penalty.tolist() == [-0.0125, -0.025]


def test_a_price_by_group_max_weighs_shares_of_the_largest():
    # .25 * 50/100 + .1 * 30/30 + .1 * 1/4 = .125 + .1 + .025; and .25 + .1 + .1
    config = LinearPenaltyConfig(normalize_by="group_max")
    penalty = config.term(cohort([50, 100], [1, 1], context=30, turns=[1, 4]), Tally(), 1)
    assert penalty == pytest.approx([-0.25, -0.45])


def test_a_largest_of_zero_costs_nothing():
    config = LinearPenaltyConfig(normalize_by="group_max")
    assert config.term(cohort([0, 0], [1, 1], context=10), Tally(), 1) == pytest.approx([-0.1, -0.1])


def test_a_gate_lets_only_the_correct_pay():
    # pass rate (1 + .5 + 0 + 1) / 4 = .625: only those at exactly 1 pay
    config = LinearPenaltyConfig(coef=1.0, gate_by_correctness=True)
    assert config.term(cohort([8, 8, 8, 16], [1, 0.5, 0, 1]), Tally(), 10).tolist() == [-0.5, 0, 0, -1]


@pytest.mark.parametrize("gated", [False, True])
def test_a_negative_pass_rate_costs_nothing_and_is_counted(gated: bool):
    tally, config = Tally(), LinearPenaltyConfig(gate_by_correctness=gated)
    assert config.term(cohort([1, 2], [1, -2]), tally, 10).tolist() == [0, 0]
    assert tally.take() == {"negative_pass_rate": 1}


def test_overlong_starts_before_the_limit_and_ends_at_one():
    # max 100, cache 20: free up to 80, half way at 90
    config = OverlongPenaltyConfig(max_tokens=100, cache_tokens=20)
    tokens = [0, 79, 80, 85, 90, 100, 500]
    assert config.term(cohort(tokens, [0] * 7), Tally(), 1).tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]


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
