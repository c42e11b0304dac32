"""Plugins by name and by import path, and what is said about those that cannot be had."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from headrace.environments.hackable import (
    TrainingSample,
    build_data_provider,
    build_objective,
    build_reward,
    build_rewards,
)
from headrace.environments.hackable.registry import TrainingSample as Sample
from headrace.environments.registry import PluginRegistry
from headrace.environments.rewards.base import REWARDS, options_by_reward
from headrace.errors import BadInput
from tests.environments.hackable.plugins import Longest, polite, shouting
from tests.refusals import refused

HERE = "tests.environments.hackable.plugins"
BATCH: tuple[Any, ...] = (["p", "p"], ["YES", "yes please"], ["", ""], [{}, {}])


def test_a_plugin_is_found_by_its_own_name_or_by_the_one_it_was_given():
    registry = PluginRegistry("reward")
    assert registry.register(shouting) is shouting
    registry.register(polite, "kind")
    assert registry.names == ["kind", "shouting"]
    assert (registry.find("shouting"), registry.find("kind")) == (shouting, polite)
    assert registry.register(shouting) is shouting, "a module may be loaded twice"


def test_two_plugins_cannot_have_one_name():
    registry = PluginRegistry("reward")
    registry.register(shouting)
    with refused(key="reward", value="shouting"):
        registry.register(Longest, "shouting")
    with refused(key="reward", value="my:reward"):
        registry.register(Longest, "my:reward")


def test_an_unknown_name_is_answered_with_the_known_ones_nearest_first():
    builders: list[tuple[Callable[[str], object], str, str]] = [
        (build_reward, "format_reward", "format_tag_reward"),
        (build_data_provider, "gsm8", "gsm8k"),
        (build_objective, "grpo", "token_grpo"),
    ]
    for build, name, nearest in builders:
        with pytest.raises(BadInput) as refused:
            build(name)
        assert refused.value.value == name
        assert (refused.value.fix or "").startswith(f"Known: {nearest}")


async def test_an_import_path_stands_for_a_reward_with_its_kwargs_bound():
    assert build_reward(f"{HERE}:shouting", {"weight": 0.5})(*BATCH) == [0.5, 0.0]
    assert build_reward(f"{HERE}:Longest", {"limit": 6})(*BATCH) == [0.5, 1.0]
    assert await build_reward(f"{HERE}:polite", {"word": "YES"})(*BATCH) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "fields"),
    [
        (f"{HERE}:shouting", {"wait": 1}, {"key": "wait", "fix": "It takes weight."}),
        (f"{HERE}:shouting", {"prompts": []}, {"key": "prompts"}),
        (f"{HERE}:Longest", {}, {"key": "limit"}),
        (f"{HERE}:NotAReward", {}, {"key": "reward", "value": f"{HERE}:NotAReward"}),
        (f"{HERE}:NUMBER", {}, {"key": "reward", "value": f"{HERE}:NUMBER"}),
        (f"{HERE}:nothing", {}, {}),
        ("no_such_module:reward", {}, {}),
        ("regex_reward", {"pattern": "a", "patern": "b"}, {"key": "patern"}),
        ("regex_reward", {"pattern": "("}, {}),
        ("exact_match_reward", {"part": "half"}, {}),
    ],
)
def test_what_cannot_be_a_reward_is_refused_by_name(name: str, kwargs: dict[str, Any], fields: dict[str, str]):
    with refused(**fields):
        build_reward(name, kwargs)


def test_the_rewards_of_an_objective_get_their_own_kwargs_and_idle_ones_must_exist():
    kwargs = {f"{HERE}:Longest": {"limit": 3}, "length_penalty_reward": {"group_size": 4}}
    rewards = build_rewards([f"{HERE}:Longest", f"{HERE}:shouting"], kwargs)
    assert [reward(*BATCH) for reward in rewards.values()] == [[1.0, 1.0], [1.0, 0.0]]
    with pytest.raises(BadInput) as refused:
        build_rewards([], {"length_penalti": {}})
    assert refused.value.value == "length_penalti"


def test_kwargs_of_a_reward_given_by_path_stand_under_the_path_or_its_last_part():
    path, other = f"{HERE}:Longest", "elsewhere:Longest"
    for key in (path, "Longest"):
        (reward,) = build_rewards([path], {key: {"limit": 3}}).values()
        assert reward(*BATCH) == [1.0, 1.0]
    for names, kwargs in (([path, other], {"Longest": {}}), ([path], {path: {}, "Longest": {}})):
        with pytest.raises(BadInput) as refused:
            options_by_reward(names, kwargs)
        assert refused.value.key == "Longest"


def test_an_import_path_stands_for_an_objective_which_must_be_one():
    assert build_objective(f"{HERE}:Shout").reward_names() == [f"{HERE}:shouting"]
    with refused(key="objective", value=f"{HERE}:NotAReward"):
        build_objective(f"{HERE}:NotAReward")


def test_a_provider_gives_the_same_samples_again_and_takes_the_seed_unless_it_has_its_own():
    provider = build_data_provider(f"{HERE}:numbers", {"count": 2}, seed=5)
    assert list(provider) == list(provider) == [TrainingSample("Write 5.", "5"), TrainingSample("Write 6.", "6")]
    own = build_data_provider(f"{HERE}:numbers", {"count": 1, "seed": 8}, seed=5)
    assert [sample.answer for sample in own] == ["8"]


def test_what_is_no_sample_is_refused_with_its_number():
    with refused(key="data provider", value=f"{HERE}:Words"):
        list(build_data_provider(f"{HERE}:Words", {"words": ["a"]}))
    with refused(key="data provider", value=f"{HERE}:NotAReward"):
        list(build_data_provider(f"{HERE}:NotAReward"))


def test_the_words_of_the_interface_are_what_users_write():
    assert list(inspect.signature(Sample).parameters) == ["prompt", "answer", "info"]
    shipped = {"format_tag_reward", "gsm8k_correctness_reward", "length_penalty_reward", "token_utilisation_reward"}
    adapted = {"math_verify", "code_execution", "judge", "regex", "json_schema", "exact_match"}
    assert shipped | {f"{name}_reward" for name in adapted} <= set(REWARDS.names)
