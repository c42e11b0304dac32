"""Rewards by their registered names, with their options."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.environments.hackable import build_data_provider
from headrace.environments.rewards import build_reward
from tests.environments.hackable.completions import STRICT, scores_of


async def test_a_reward_of_one_answer_scores_each_of_a_batch():
    reward = build_reward("exact_match_reward", {"ignore_case": True})
    assert await scores_of(reward, ["Yes", "no", STRICT.write("so", "yes")], "yes") == [1.0, 0.0, 0.0]


async def test_it_may_see_only_what_is_boxed_and_then_what_is_malformed_earns_nothing():
    reward = build_reward("exact_match_reward", {"part": "answer"})
    assert await scores_of(reward, ["yes", STRICT.write("so", "yes"), STRICT.write("so", "no")], "yes") == [
        0.0,
        1.0,
        0.0,
    ]


async def test_it_finds_what_the_sample_has_besides_its_answer():
    reward = build_reward("exact_match_reward", {"field": "other"})
    assert await scores_of(reward, ["perhaps"], "yes", other="perhaps") == [1.0]
    asked = build_reward("exact_match_reward", {"field": "prompt"})
    assert await scores_of(asked, ["2+2?"], "yes") == [1.0]


async def test_numbers_are_compared_as_numbers():
    assert await scores_of(build_reward("numeric_reward"), ["It is #### 1,000", r"\boxed{1e3}", "7"], "1000") == [
        1,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "counts"),
    [
        ("math_verify_reward", {"timeout": 2.0}, {"timeouts": 0, "failures": 0}),
        ("code_execution_reward", {"tests_field": "asserts", "timeout": 1.0}, {"timeouts": 0, "failures": 0}),
        ("regex_reward", {"pattern": r"\d+", "full": True}, {"timeouts": 0}),
        ("json_schema_reward", {"schema": {"type": "object"}}, {"timeouts": 0}),
        ("judge_reward", {"base_url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{prompt} {text}"}, None),
    ],
)
async def test_those_that_need_processes_take_their_own_kwargs_and_can_be_closed(
    name: str, kwargs: dict[str, Any], counts: dict[str, int] | None
):
    reward: Any = build_reward(name, kwargs)
    assert reward.bounded
    assert counts is None or reward.counts == counts
    await reward.close()


@pytest.mark.full
async def test_those_that_need_processes_score_in_them():
    cases: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("math_verify_reward", {}, r"\boxed{(x+1)^2}", {}),
        ("code_execution_reward", {}, "```python\ntwo = 2\n```", {"tests": ["assert two == 2"]}),
        ("regex_reward", {"pattern": "^a+$"}, "aaa", {}),
        ("json_schema_reward", {"schema": {"type": "array"}}, "[1]", {}),
    ]
    for name, kwargs, right, info in cases:
        reward: Any = build_reward(name, kwargs)
        assert await scores_of(reward, [right, "no"], "x^2+2x+1", **info) == [1.0, 0.0], name
        await reward.close()


@pytest.mark.full
async def test_a_family_of_reasoning_gym_gives_samples_and_scores_their_answers():
    kwargs = {"family": "chain_sum", "num_tasks": 3, "settings": {"min_terms": 2, "max_terms": 2}}
    found, again, other = (list(build_data_provider("reasoning_gym", kwargs, seed)) for seed in (1, 1, 2))
    assert found == again != other
    assert len(found) == 3
    first = found[0]
    reward: Any = build_reward("reasoning_gym_reward")
    completions = [STRICT.write("so", first.answer), STRICT.write("so", "no"), first.answer]
    scores = await scores_of(reward, completions, first.answer, **first.info)
    assert scores[0] == 1.0 and scores[1] < 0.1 and scores[2] == 0.0
    await reward.close()
