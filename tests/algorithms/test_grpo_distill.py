"""GRPO and distillation in one batch."""

from typing import Any

import numpy as np
import pytest

from headrace.algorithms.grpo_distill import GrpoDistill, GrpoDistillConfig
from headrace.config.base import ConfigError
from headrace.orchestrator.filters import has_no_advantage
from headrace.rollout.routing import gradient_shares, route_actions, training_problem
from headrace.tools.check_algorithm.fixtures import TEACHER, algorithm_config
from tests.algorithms.teachers import Teacher, pretended_logprobs, rollout_of, set_up, survivors


async def trained(rewards: list[float], teacher: Teacher, **weights: float) -> list[Any]:
    algorithm = await set_up(GrpoDistill(teacher, **weights))
    group = survivors([rollout_of([5 + n, 6], reward=reward) for n, reward in enumerate(rewards)])
    await algorithm.score_group(group)
    assert not any(has_no_advantage(survivor.rollout) for survivor in group)  # all learn from the teacher
    await algorithm.score_batch(group)
    for survivor in group:
        for sample in survivor.samples:
            route_actions(sample, algorithm.action_loss_type)
    return group


async def test_each_sampled_token_is_in_both_losses_with_its_weights():
    group = await trained([1.0, 0.0], Teacher(), rl_weight=2.0, ref_kl_weight=0.5)
    for survivor, advantage in zip(group, (0.5, -0.5), strict=True):
        [sample] = survivor.samples
        assert training_problem(sample) == ""
        streams = {name: values.tolist() for name, values in sample.streams.items() if name != "ref_logprobs"}
        assert streams == {
            "advantages": [0, advantage, advantage],
            "rl_weights": [0, 2, 2],
            "ref_kl_weights": [0, 0.5, 0.5],
        }
        expected = pretended_logprobs(sample.token_ids)
        assert sample.streams["ref_logprobs"].tolist() == expected.astype(np.float32).tolist()
        shares = gradient_shares(survivor.rollout)
        assert shares["rl"] == (2.0, 2)  # two tokens, |A| * w = 1 each
        assert shares["ref_kl"].total == pytest.approx(0.5 * np.abs(expected - sample.logprobs)[1:].sum(), rel=1e-6)


async def test_without_credit_the_teacher_alone_is_learned_from():
    for survivor in await trained([1.0, 1.0], Teacher()):
        assert gradient_shares(survivor.rollout).keys() == {"ref_kl"}


async def test_what_the_teacher_did_not_score_is_dropped():
    group = await trained([1.0, 0.0], Teacher(fails=lambda token_ids: token_ids[1] == 5))
    assert [survivor.drop_reason for survivor in group] == ["no_reference", ""]


@pytest.mark.parametrize("keys", [{"teacher": "policy"}, {"teacher": TEACHER, "ref_kl_weight": 0}])
def test_the_policy_as_its_own_teacher_and_a_weight_of_zero_are_refused(keys: dict[str, Any]):
    with pytest.raises(ConfigError) as refusal:
        algorithm_config({"type": "grpo_distill", **keys}, "test")
    assert refusal.value.problems[0].key == f"algo.{list(keys)[-1]}"


def test_it_takes_the_keys_of_grpo():
    settings = {"type": "grpo_distill", "length_penalty": "linear", "normalize": "std"}
    config = algorithm_config(settings, "test")
    assert isinstance(config, GrpoDistillConfig)
    assert config.length_penalty is not None and config.length_penalty.type == "linear"
