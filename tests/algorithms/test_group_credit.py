"""Credit as a sum of terms over one baseline."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView, Tally
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.length_penalties import (
    LengthPenalty,
    LinearPenaltyConfig,
    OverlongPenaltyConfig,
    TokensPenaltyConfig,
    TurnsPenaltyConfig,
)
from tests.algorithms.groups import make_group


def by_seq_len(seq_len: int, gated: bool = False) -> LengthPenalty:
    return LinearPenaltyConfig(coef=0.25, gate_by_correctness=gated).make(seq_len)


def by_group_max(output: float, input_: float, turns: float, gated: bool = False) -> LengthPenalty:
    weights = {"output_weight": output, "input_weight": input_, "turns_weight": turns}
    return LinearPenaltyConfig(normalize_by="group_max", gate_by_correctness=gated, **weights).make(1)


def overlong(max_tokens: int, cache_tokens: int) -> LengthPenalty:
    return OverlongPenaltyConfig(max_tokens=max_tokens, cache_tokens=cache_tokens).make(1)


TOKENS, TURNS = TokensPenaltyConfig().make(1), TurnsPenaltyConfig().make(1)


def credit(group: Sequence[RolloutView], **settings: Any) -> np.ndarray:
    return GroupCredit(**settings).advantages(group, Tally())


def rewarded(group: Sequence[RolloutView], rewards: np.ndarray) -> Sequence[RolloutView]:
    """The same rollouts with other rewards."""
    for view, reward in zip(group, rewards, strict=True):
        view.rollout.reward = float(reward)
    return group


def diversity(group: Sequence[RolloutView], scale: float = 1.0) -> list[float]:
    """A bonus for a length that few siblings have."""
    lengths = [view.rollout.completion_tokens for view in group]
    return [scale / lengths.count(length) for length in lengths]


def test_a_linear_penalty_takes_from_the_long_and_gives_to_the_short():
    # p = .25 * .5 * [.1, .2, .1, .2], its mean .01875
    group = make_group([1, 1, 0, 0], [100, 200, 100, 200])
    expected = [0.50625, 0.49375, -0.49375, -0.50625]
    assert credit(group, penalty=by_seq_len(1000)) == pytest.approx(expected, abs=1e-15)


def test_a_gated_penalty_is_paid_by_the_correct():
    # p = [.0125, .025, 0, 0], its mean .009375
    group = make_group([1, 1, 0, 0], [100, 200, 100, 200])
    expected = [0.5 - 0.003125, 0.5 - 0.015625, -0.5 + 0.009375, -0.5 + 0.009375]
    assert credit(group, penalty=by_seq_len(1000, gated=True)) == pytest.approx(expected, abs=1e-15)


def test_a_baseline_over_tokens_weighs_the_long():
    assert credit(make_group([1, 0], [100, 300]), length_weighted=True).tolist() == [0.75, -0.25]


def test_a_penalty_uses_the_baseline_of_the_reward():
    # pass rate .5, p = [.0125, .0375]; B(p) = (100 * .0125 + 300 * .0375) / 400 = .03125
    group = make_group([1, 0], [100, 300])
    result = credit(group, length_weighted=True, penalty=by_seq_len(1000))
    assert result == pytest.approx([0.75 + 0.01875, -0.25 - 0.00625], abs=1e-15)


@pytest.mark.parametrize("length_weighted", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_penalty_as_a_term_is_a_penalty_folded_into_the_reward(gated: bool, length_weighted: bool):
    random = np.random.default_rng(7)
    separate = GroupCredit(length_weighted=length_weighted, penalty=by_seq_len(4096, gated=gated))
    folded = GroupCredit(length_weighted=length_weighted)
    pool = make_group([0.0] * 200, random.integers(1, 4097, 200))
    furthest = 0.0
    for _ in range(2000):
        size, start = int(random.integers(1, 9)), int(random.integers(190))
        group = pool[start : start + size]
        rewards = random.choice([0.0, 0.3, 1.0], size) if random.random() < 0.7 else random.random(size)
        lengths = np.array([view.rollout.completion_tokens for view in group])
        pays = (rewards == 1.0) if gated else np.ones(size)
        penalty = 0.25 * rewards.mean() * lengths / 4096 * pays
        terms = separate.advantages(rewarded(group, rewards), Tally())
        whole = folded.advantages(rewarded(group, rewards - penalty), Tally())
        furthest = max(furthest, float(np.abs(terms - whole).max()))
    assert furthest < 1e-12


@pytest.mark.parametrize("length_weighted", [False, True])
def test_a_users_term_is_a_bonus_folded_into_the_reward(length_weighted: bool):
    rewards, lengths = [1.0, 0.0, 0.5, 1.0], [3, 7, 7, 20]
    bonus = partial(diversity, scale=0.2)  # .2, .1, .1, .2
    terms = credit(make_group(rewards, lengths), length_weighted=length_weighted, terms=[bonus])
    whole = credit(make_group([1.2, 0.1, 0.6, 1.2], lengths), length_weighted=length_weighted)
    np.testing.assert_allclose(terms, whole, rtol=0, atol=1e-12)


def test_terms_and_a_penalty_add_up():
    group = make_group([1, 1, 0, 0], [100, 200, 100, 100])
    penalty = by_seq_len(1000)
    both = credit(group, penalty=penalty, terms=[diversity, partial(diversity, scale=2.0)])
    apart = credit(group, penalty=penalty) + 3 * (credit(group, terms=[diversity]) - credit(group))
    np.testing.assert_allclose(both, apart, rtol=0, atol=1e-12)


def test_only_the_reward_is_divided_by_its_deviation():
    # reward [1, -1, ...] over a deviation of .5; p = [.0125, .025, .0125, .025] around .01875, undivided
    group = make_group([1, 1, 0, 0], [100, 200, 100, 200])
    result = credit(group, normalize="std", penalty=by_seq_len(1000))
    one = 0.5 / (0.5 + 1e-6)
    assert result == pytest.approx([one + 0.00625, one - 0.00625, -one + 0.00625, -one - 0.00625], abs=1e-15)


def test_a_penalty_by_group_max_counts_context_and_turns():
    # pass rate .5; first: .25 * 1 + .1 * 15/15 + .1 * 2/2; second: .25 * .5 + .1 * 5/15 + .1 * 1/2
    group = make_group([1, 0], [8, 4], prompts=5, turns=[2, 1], tool_tokens=[10, 0])
    p = 0.5 * np.array([0.45, 0.125 + 0.1 / 3 + 0.05])
    expected = np.array([0.5, -0.5]) + p.mean() - p
    assert credit(group, penalty=by_group_max(0.25, 0.1, 0.1)) == pytest.approx(expected, abs=1e-15)


def test_an_overlong_rollout_pays_whatever_the_pass_rate():
    # free up to 80, .5 at 90, 1 at 100
    group = make_group([0, 0, 0], [80, 90, 100])
    assert credit(group, penalty=overlong(100, 20)).tolist() == [0.5, 0, -0.5]


def test_efficiency_in_tokens_rewards_the_brief_among_the_correct():
    # r' = [1.5, 1, 0, 1], its mean .875
    group = make_group([1, 1, 0, 1], [10, 30, 20, 20])
    assert credit(group, penalty=TOKENS).tolist() == [0.625, 0.125, -0.875, 0.125]


@pytest.mark.parametrize(("tool_weight", "bonus"), [(1.0, 0.6), (0.0, 0.0)])
def test_efficiency_in_tokens_weighs_what_tools_answered(tool_weight: float, bonus: float):
    # costs 10 + 0 and 10 + 30: 10 of a mean of 25 saves .6
    group = make_group([1, 1], 10, turns=2, tool_tokens=[0, 30])
    result = credit(group, penalty=TokensPenaltyConfig(tool_response_weight=tool_weight).make(1))
    assert result == pytest.approx([bonus / 2, -bonus / 2], abs=1e-15)


def test_efficiency_in_turns_rewards_the_quick_among_the_correct():
    # mean turns of the correct 2: r' = [1.5, 1, 0]
    group = make_group([1, 1, 0], 6, turns=[1, 3, 1])
    assert credit(group, penalty=TURNS) == pytest.approx([1.5 - 2.5 / 3, 1 - 2.5 / 3, -2.5 / 3])


@pytest.mark.parametrize("penalty", [TOKENS, TURNS])
@pytest.mark.parametrize("rewards", [[0, -1, -1], [0, 0, 0]])
def test_efficiency_without_a_positive_reward_is_plain_grpo(penalty: LengthPenalty, rewards: list[float]):
    group = make_group(rewards, [1, 2, 3])
    assert credit(group, penalty=penalty).tolist() == credit(group).tolist()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("penalty", [partial(by_seq_len, 1000), partial(by_group_max, 1, 1, 1)])
def test_a_negative_pass_rate_leaves_the_reward_alone_and_is_counted(penalty: Any, gated: bool):
    tally = Tally()
    result = GroupCredit(penalty=penalty(gated=gated)).advantages(make_group([1, -2], [100, 200]), tally)
    assert result.tolist() == [1.5, -1.5]
    assert tally.take() == {"negative_pass_rate": 1}


def test_a_negative_pass_rate_is_nothing_to_other_penalties():
    tally = Tally()
    GroupCredit(penalty=overlong(100, 20)).advantages(make_group([0, -1]), tally)
    GroupCredit(penalty=TOKENS).advantages(make_group([0, -1]), tally)
    assert tally.take() == {}


def test_without_any_token_the_length_weighted_credit_is_over_the_mean():
    assert credit(make_group([1, 0], 0), length_weighted=True).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("length_weighted", [False, True])
@pytest.mark.parametrize("normalize", [None, "std"])
def test_equal_rewards_and_equal_lengths_carry_no_signal_under_any_penalty(normalize: Any, length_weighted: bool):
    every = [None, by_seq_len(1000), by_group_max(0.25, 0.1, 0.1, gated=True), overlong(100, 99),
             TOKENS, TURNS]  # fmt: skip
    for penalty in every:
        group = make_group([0.3] * 6, 33)
        result = credit(group, normalize=normalize, length_weighted=length_weighted, penalty=penalty)
        assert result.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    "settings",
    [
        {"penalty": by_seq_len(64, gated=True), "length_weighted": True},
        {"penalty": by_group_max(0.25, 0.1, 0.1), "normalize": "std"},
        {"penalty": overlong(32, 16), "terms": [diversity]},
        {"penalty": TOKENS},
    ],
)
def test_credit_follows_its_rollout_in_any_order(settings: dict[str, Any]):
    random = np.random.default_rng(3)
    for _ in range(50):
        size = int(random.integers(1, 7))
        rewards, lengths = random.choice([0.0, 0.5, 1.0], size), random.integers(1, 40, size)
        order = random.permutation(size)
        before = credit(make_group(rewards, lengths), **settings)
        after = credit(make_group(rewards[order], lengths[order]), **settings)
        np.testing.assert_allclose(after, before[order], rtol=0, atol=1e-12)


def too_few(group: Sequence[RolloutView]) -> list[float]:
    return [0.5]


def not_finite(group: Sequence[RolloutView], value: float) -> list[float]:
    return [value] * len(group)


def forgetful(group: Sequence[RolloutView]) -> None:
    """Returns nothing."""


def words(group: Sequence[RolloutView]) -> list[str]:
    return ["good"] * len(group)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (too_few, r"test_group_credit:too_few.*\(1,\).*\b2\b"),
        (partial(not_finite, value=float("nan")), "test_group_credit:not_finite.*nan"),
        (partial(not_finite, value=float("-inf")), "test_group_credit:not_finite.*-inf"),
        (forgetful, "test_group_credit:forgetful.*nan"),
        (words, "test_group_credit:words"),
    ],
)
def test_a_term_that_is_not_one_finite_number_per_rollout_is_named(term: Any, message: str):
    with pytest.raises(ValueError, match=message):
        credit(make_group([1, 0]), terms=[term])


def test_a_single_number_is_not_spread_over_the_group():
    with pytest.raises(ValueError, match="<lambda>"):
        credit(make_group([1, 0]), terms=[lambda group: 0.5])


def test_what_rounding_leaves_of_terms_that_cancel_is_no_credit():
    lengths = [100, 200, 300]
    penalty = [0.1 * length / 300 for length in lengths]
    rewards = [0.5 + taken for taken in penalty]  # what each gains over the others, the bonus takes away again
    found = credit(make_group(rewards, lengths), terms=[lambda group: [-taken for taken in penalty]])
    assert found.tolist() == [0, 0, 0]


def test_small_credit_that_is_no_rounding_stays():
    found = credit(make_group([0.3, 0.3 + 1e-9]))
    np.testing.assert_allclose(found, [-5e-10, 5e-10], rtol=1e-6)
