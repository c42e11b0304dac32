"""Total rewards, and which rollouts can be used."""

import math
from typing import Any

import numpy as np
import pytest

from headrace.rollout.checks import LARGEST_REWARD, check_rollout, checked_rollouts, total_reward
from headrace.rollout.types import NOT_SAMPLED, Rollout, RolloutError, Turn


def rollout(**fields: Any) -> Rollout:
    return Rollout(**{"rewards": {"r": 1.0}, "turns": [Turn([1], [2, 3], [-0.5, -0.5], [0, 0], 1.0)]} | fields)


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ((0.7, 0.2, 0.1), 1.0),  # one after the other they make 0.9999999999999999
        ((0.1,) * 10, 1.0),
        ((0.5, -0.25), 0.25),
        ((), math.nan),
        ((math.inf, -math.inf), math.nan),
        ((1e308, 1e308), math.nan),
        ((1.0, math.inf), math.inf),
    ],
)
def test_a_rollouts_rewards_are_added_up_and_rounded_once(parts: tuple[float, ...], total: float):
    rewards = {str(number): part for number, part in enumerate(parts)}
    assert total_reward(rewards) == pytest.approx(total, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("reward", [1e39, -1e39, 1.01 * LARGEST_REWARD])
def test_a_reward_too_large_to_credit_is_an_error_of_its_rollout_that_names_it(reward: float):
    huge = rollout(rewards={"speed": reward})
    check_rollout(huge, scored_later=False)
    assert math.isnan(huge.reward)
    assert huge.error is not None and huge.error.reason == "invalid_reward"
    assert f"rewards {{'speed': {reward}}}" in huge.error.detail


def test_the_largest_reward_is_a_reward():
    large = rollout(rewards={"r": -LARGEST_REWARD})
    check_rollout(large, scored_later=False)
    assert (large.error, large.reward) == (None, -LARGEST_REWARD)


GOOD: dict[str, Any] = {
    "prompt_ids": [0, 9],
    "completion_ids": [9, 0],
    "logprobs": [-50.0, 1e-6],  # what rounding leaves of 0
    "versions": [NOT_SAMPLED, 3],
    "temperature": 0.1,
}
GOOD_TURN = Turn(**GOOD)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt_ids": [0, 10]}, "prompt_ids contain 10"),
        ({"completion_ids": [10**9, 1]}, "completion_ids contain 1000000000"),
        ({"completion_ids": [1, -5]}, "completion_ids contain -5"),
        ({"logprobs": [-1.0, math.nan]}, "logprobs contain nan"),
        ({"logprobs": [-math.inf, -1.0]}, "logprobs contain -inf"),
        ({"logprobs": [0.5, -1.0]}, "logprobs contain 0.5"),
        ({"versions": [0, -2]}, "versions contain -2"),
        ({"temperature": 0.0}, "temperature = 0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
    ],
)
def test_a_turn_that_no_trainer_could_use_is_an_error_of_its_rollout_where_it_is_trained(
    wrong: dict[str, Any], words: str
):
    def checked(vocab_size: int | None = None, **fields: Any) -> RolloutError | None:
        made = rollout(turns=[GOOD_TURN, Turn(**GOOD | wrong)], **fields)
        check_rollout(made, scored_later=False, vocab_size=vocab_size)
        return made.error

    error = checked(vocab_size=10)
    assert error is not None and error.reason == "invalid_rollout" and error.detail.startswith(f"turn 1: {words}")
    assert checked() is None  # an evaluation may be greedy: nothing is trained
    assert checked(vocab_size=10, trainable=False) is None


def test_turns_at_the_edge_of_what_can_be_trained_on_are_fit():
    every_second = np.array([3, 99, 4, 99], np.int32)[::2]
    edge = rollout(turns=[GOOD_TURN, Turn([], every_second, [-1.0, -1.0], [0, 0], 1.0), Turn([], [], [], [], 1.0)])
    check_rollout(edge, scored_later=False, vocab_size=10)
    assert edge.error is None


def test_a_rollout_is_returned_once():
    first, second = rollout(), rollout()
    assert checked_rollouts([first, second]) == [first, second]
    with pytest.raises(ValueError, match="Rollout"):
        checked_rollouts([first, first])
    first.group_id = "earlier"
    with pytest.raises(ValueError, match="Rollout"):
        checked_rollouts([first])
