"""Credit by a user's function."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView
from headrace.algorithms.custom import Custom
from tests.algorithms.groups import advantages, make_group


def best_of(group: Sequence[RolloutView], bonus: float = 1.0) -> list[float]:
    best = max(view.reward for view in group)
    return [bonus if view.reward == best else 0.0 for view in group]


def ramp(group: Sequence[RolloutView]) -> list[np.ndarray]:
    """More credit the later the token."""
    return [view.reward * np.arange(view.completion_length) for view in group]


async def test_a_function_of_the_group_gives_each_rollout_a_number():
    group = make_group([0.2, 0.9, 0.5])
    await Custom(partial(best_of, bonus=2.0)).score_group(group)
    assert advantages(group) == [0, 2, 0]


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.array])
async def test_any_kind_of_number_will_do(kind: Any):
    group = make_group([1, 0])
    await Custom(lambda views: [kind(3) for _ in views]).score_group(group)
    assert advantages(group) == [3, 3]


async def test_an_array_over_the_group_will_do():
    group = make_group([1, 0])
    await Custom(lambda views: np.array([view.reward for view in views])).score_group(group)
    assert advantages(group) == [1, 0]


async def test_a_function_may_credit_every_token():
    group = make_group([1, 2], [3, 2])
    await Custom(ramp).score_group(group)
    assert [view.samples[0].streams["advantages"].tolist() for view in group] == [[0, 0, 1, 2], [0, 0, 2]]


async def test_numbers_and_tokens_may_be_mixed():
    group = make_group([1, 1], [2, 3])
    await Custom(lambda views: [0.5, [1, 2, 3]]).score_group(group)
    assert [view.samples[0].streams["advantages"].tolist() for view in group] == [[0, 0.5, 0.5], [0, 1, 2, 3]]


def one_too_many(group: Sequence[RolloutView]) -> list[float]:
    return [0.0] * (len(group) + 1)


def forgetful(group: Sequence[RolloutView]) -> None:
    """Returns nothing."""


def too_short(group: Sequence[RolloutView]) -> list[list[float]]:
    return [[0.5] for _ in group]


def infinite(group: Sequence[RolloutView]) -> list[float]:
    return [float("inf") for _ in group]


def by_number(group: Sequence[RolloutView]) -> dict[int, float]:
    return {number: 5.0 for number, _ in enumerate(group)}


def in_words(group: Sequence[RolloutView]) -> str:
    return "12"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_too_many, "test_custom:one_too_many.*3.*2"),
        (forgetful, "test_custom:forgetful.*NoneType"),
        (too_short, "test_custom:too_short.*1.*2.*task-0"),
        (infinite, "test_custom:infinite.*inf"),
        (by_number, "test_custom:by_number.*dict"),
        (in_words, "test_custom:in_words.*str"),
    ],
)
async def test_what_cannot_be_credited_names_the_function(function: Any, message: str):
    with pytest.raises(ValueError, match=message):
        await Custom(function).score_group(make_group([1, 0]))
