"""What token_grpo makes of scores, against numbers worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.environments.hackable import Objective, Progress, TrainingSample, build_objective
from headrace.environments.hackable.objectives import CORRECTNESS, FORMAT, LENGTH, UTILISATION, TwoStages
from tests.refusals import refused

SCORES = {
    CORRECTNESS: [1.0, 1.0, 0.0, 1.0],
    FORMAT: [1.0, 0.0, 1.0, 0.5],
    LENGTH: [0.5, 0.25, 1.0, 0.5],
    UTILISATION: [0.1, -0.1, 0.0, 0.0],
}


def worth(kwargs: dict[str, Any], progress: Progress | None = None, more: dict[str, list[float]] | None = None) -> list:
    """As a scorer would ask it: with the scores of the rewards that it names, and no others."""
    objective = build_objective("token_grpo", kwargs).at(progress or Progress())
    known = {**SCORES, **(more or {})}
    scores = {name: known[name] for name in objective.reward_names()}
    return objective.combine_rewards(scores, [TrainingSample("2+2?", "4")] * 4)


def test_additive_is_the_sum_of_what_is_enabled():
    assert worth({}) == [2.0, 1.0, 1.0, 1.5]
    assert worth({"enable_length_penalty": True}) == [2.5, 1.25, 2.0, 2.0]
    assert worth({"enable_token_utilisation": True}) == pytest.approx([2.1, 0.9, 1.0, 1.5])
    assert build_objective("token_grpo").reward_names() == [CORRECTNESS, FORMAT]


def test_the_gate_replaces_all_that_a_sample_without_the_format_earned():
    assert worth({"strict_format_gate": True}) == [2.0, -1.0, 1.0, -1.0]
    assert worth({"strict_format_gate": True, "non_strict_penalty": -0.25}) == [2.0, -0.25, 1.0, -0.25]
    weighted = {"reward_mode": "weighted_length_penalty", "strict_format_gate": True}
    assert worth(weighted) == [2.25, -1.0, 1.0, -1.0]


def test_weighted_pays_brevity_to_what_is_right():
    weighted = {"reward_mode": "weighted_length_penalty", "length_penalty_lambda": 0.4}
    # c + .4 * c * l + f
    assert worth(weighted) == pytest.approx([2.2, 1.1, 1.0, 1.7])
    # 5 * c + .4 * c * l + f + u
    heavy = {**weighted, "correctness_weight": 5.0, "enable_token_utilisation": True}
    assert worth(heavy) == pytest.approx([6.3, 5.0, 1.0, 5.7])


def test_the_interaction_with_the_format_pays_brevity_to_what_is_right_and_in_format():
    weighted = {"reward_mode": "weighted_length_penalty", "length_penalty_interaction": "correctness_length_format"}
    # c + .5 * c * l * f + f
    assert worth(weighted) == pytest.approx([2.25, 1.0, 1.0, 1.625])


def test_without_the_length_penalty_there_is_no_brevity_and_none_is_asked_for():
    off = {"reward_mode": "weighted_length_penalty", "enable_length_penalty": False}
    assert worth(off) == [2.0, 1.0, 1.0, 1.5]
    assert LENGTH not in build_objective("token_grpo", off).reward_names()
    assert LENGTH in build_objective("token_grpo", {"reward_mode": "weighted_length_penalty"}).reward_names()


def test_what_is_right_may_be_said_by_another_reward_and_more_may_be_added():
    kwargs = {"correctness_reward": "my_module:right", "additional_rewards": ["polite"]}
    assert build_objective("token_grpo", kwargs).reward_names() == ["my_module:right", FORMAT, "polite"]
    more = {"my_module:right": [0.0, 1.0, 1.0, 0.0], "polite": [0.1, 0.2, 0.3, 0.4]}
    assert worth(kwargs, more=more) == pytest.approx([1.1, 1.2, 2.3, 0.9])


@pytest.mark.parametrize(
    ("start", "before", "at"),
    [
        ({"stage2_start_step": 10}, Progress(9, 100.0), Progress(10, 0.0)),
        ({"stage2_start_epoch": 1.5}, Progress(1000, 1.49), Progress(0, 1.5)),
    ],
)
def test_the_second_stage_begins_at_its_boundary_whenever_it_is_asked(start: dict, before: Progress, at: Progress):
    kwargs = {"reward_mode": "weighted_length_penalty", "length_penalty_lambda": 0.0, **start}
    kwargs["stage2_length_penalty_lambda"] = 1.0
    objective = build_objective("token_grpo", kwargs)
    after = Progress(at.step + 500, at.epoch + 5)
    for progress, stage, value in ((after, 2, 1.0), (before, 1, 0.0), (at, 2, 1.0)):  # a resume asks in any order
        assert objective.at(progress).metrics() == {"stage": stage, "length_penalty_lambda": value}
        assert worth(kwargs, progress) == [2.0 + 0.5 * value, 1.0 + 0.25 * value, 1.0, 1.5 + 0.5 * value]
    assert objective.metrics()["stage"] == 1, "asking what it will be does not change what it is"


def test_a_schedule_without_a_second_stage_stays_in_the_first():
    assert (TwoStages(0.5).value(Progress(10**9, 1e9)), TwoStages(0.5).stage(Progress(10**9, 1e9))) == (0.5, 1)


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"length_penalty_lambda": float("inf")}, "length_penalty_lambda"),
        ({"correctness_weight": "1"}, "correctness_weight"),
        ({"stage2_start_step": 5}, "stage2_start_step"),
        ({"stage2_length_penalty_lambda": 1.0}, "stage2_length_penalty_lambda"),
        ({"stage2_start_epoch": 1, "stage2_length_penalty_lambda": 1.0, "stage2_start_step": 5}, "stage2_start_epoch"),
        ({"additional_rewards": [LENGTH]}, "additional_rewards"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(kwargs: dict, key: str):
    with refused(key=key, value=kwargs[key]):
        build_objective("token_grpo", kwargs)


@pytest.mark.parametrize(
    "kwargs", [{"reward_mode": "sum"}, {"length_penalty_interaction": "all"}, {"strict_format_gate": 1}]
)
def test_a_choice_or_a_flag_that_is_none_is_refused(kwargs: dict):
    ((key, value),) = kwargs.items()
    with refused(key=key, value=value):
        build_objective("token_grpo", kwargs)


def test_an_unknown_setting_is_refused_with_those_that_there_are_nearest_first():
    with refused(key="length_penalty_lamda") as error:
        build_objective("token_grpo", {"length_penalty_lamda": 0.5})
    assert str(error.value.fix).startswith("It takes length_penalty_lambda, ")


def test_an_objective_has_no_extra_reward_unless_it_says_so():
    assert Objective().extra_reward([], []) is None
