"""Objectives that think in latent space, by name; and hooks that see how a completion was sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.base import ConfigError
from headrace.environments.hackable import Objective, Scorer, Trace, TrainingSample
from tests.environments.hackable.files import load_tree, small


@pytest.mark.parametrize(("name", "kind"), [("latent_neuralese", "hybrid"), ("soft_tokens", "soft")])
def test_a_latent_objective_sets_up_the_model_the_loss_and_an_on_policy_run(tmp_path: Path, name: str, kind: str):
    config, _ = load_tree(tmp_path, small(objective={"name": name}))
    for model in (config.model, config.trainer.model, config.orchestrator.model, config.inference.model):
        assert model.latents is not None
        assert (model.latents.type, model.latents.until, model.latents.tau) == (kind, "</think>", 0.5)
    assert (config.orchestrator.max_async_level, config.trainer.loss.type) == (0, "reinforce")


def test_latent_neuralese_has_advantages_in_standard_deviations_and_a_penalty_to_the_start(tmp_path: Path):
    config, _ = load_tree(tmp_path, small(objective={"name": "latent_neuralese"}))
    algo = config.orchestrator.algo_of(config.orchestrator.train.env[0])
    assert (algo.type, algo.normalize) == ("grpo", "std")
    assert (algo.kl.coef, algo.kl.estimator, algo.kl.reference) == (0.005, "k3", "start")


def test_soft_thoughts_are_not_compared_with_a_reference(tmp_path: Path):
    tree = small(objective={"name": "soft_tokens"}, orchestrator={"algo": {"kl": {"coef": 0.1}}})
    with pytest.raises(ConfigError) as error:
        load_tree(tmp_path, tree)
    assert [problem.key for problem in error.value.problems] == ["orchestrator.algo.kl.coef"]


def test_thoughts_end_with_the_closing_tag_of_the_data_and_settings_of_the_file_take_precedence(tmp_path: Path):
    tags = ["<redacted_thinking>", "</redacted_thinking>"]
    tree = small(objective={"name": "latent_neuralese"}, data={"kwargs": {"tags": tags}})
    tree["model"] = {"name": tree["model"], "latents": {"tau": 0.7, "gates_lr": 1e-3}}
    latents = load_tree(tmp_path, tree)[0].model.latents
    assert latents is not None
    assert (latents.until, latents.tau, latents.gates_lr, latents.retention_lr) == (tags[1], 0.7, 1e-3, 1e-3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"inference": {"engine": "vllm"}}, "inference.engine"),
        ({"trainer": {"use_vllm": True}}, "inference.engine"),
        ({"orchestrator": {"max_async_level": 1}}, "orchestrator.max_async_level"),
    ],
)
def test_vllm_and_stale_rollouts_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as error:
        load_tree(tmp_path, small(objective={"name": "latent_neuralese"}, **changes))
    assert [problem.key for problem in error.value.problems] == [key]


class Sparse(Objective):
    """Rewards thoughts with small latents and likely tokens."""

    def reward_names(self) -> list[str]:
        return []

    def combine_rewards(self, scores, samples) -> list[float]:
        return [1.0] * len(samples)

    def extra_reward(self, samples, completions, traces) -> list[float]:
        return [
            len(trace.token_ids) + float(trace.logprobs.sum()) + (0 if trace.latents is None else trace.latents.sum())
            for trace in traces
        ]


class OfTexts(Sparse):
    def extra_reward(self, samples, completions) -> list[float]:  # type: ignore[override]
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(("objective", "expected"), [(Sparse(), [1 + 2 - 0.5 + 6, 1.0]), (OfTexts(), [4.0, 2.0])])
def test_the_hook_of_an_objective_sees_tokens_logprobs_and_latents_or_texts_alone(objective: Objective, expected: Any):
    samples, texts = [TrainingSample("2+2?", "4")] * 2, ["abc", "d"]
    latent = Trace(np.array([7, 8]), np.array([-0.25, -0.25], np.float32), np.ones((2, 3), np.float16))
    nothing = Trace(np.zeros(0, np.int32), np.zeros(0, np.float32))
    scored = asyncio.run(Scorer(objective, {}).score(samples, texts, traces=[latent, nothing]))
    assert [each.reward for each in scored] == expected
