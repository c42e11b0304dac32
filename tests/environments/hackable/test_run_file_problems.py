"""What is wrong with a file of data, rewards and an objective is named by the key that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from tests.environments.hackable.files import load_tree, run_of, small


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"objectiv": {}, "storage": {}}, "objectiv", "objective?"),
        ({"generation": {"num_generation": 2}}, "generation.num_generation", "generation.num_generations?"),
        ({"generation": {"temperature": 0}}, "generation.temperature", ""),
        ({"generation": {"repetition_penalty": 1.1}}, "generation.repetition_penalty", ""),
        ({"objective": {"name": "token_grp"}}, "objective.name", "token_grpo"),
        ({"objective": {"class_path": "no_such:Thing"}}, "objective.class_path", ""),
        ({"objective": {"class_path": "Thing"}}, "objective.class_path", "package.module:Name"),
        ({"objective": {"name": "a", "class_path": "b:C"}}, "objective.class_path", ""),
        ({"objective": {"kwargs": {"reward_mod": 1}}}, "objective.kwargs.reward_mod", "objective.kwargs.reward_mode?"),
        ({"objective": {"kwargs": {"reward_mode": "x"}}}, "objective.kwargs.reward_mode", ""),
        ({"objective": {"kwargs": {"stage2_start_step": 2}}}, "objective.kwargs.stage2_start_step", ""),
        ({"data": {"provider": "gsm"}}, "data.provider", "gsm8k"),
        ({"data": {"kwargs": {"digit": 2}}}, "data.kwargs.digit", "data.kwargs.digits?"),
        ({"data": {"provider": "local"}}, "data.kwargs.path", ""),
        ({"data": {"eval": {"kwargs": {"digit": 2}}}}, "data.eval.kwargs.digit", "data.eval.kwargs.digits?"),
        ({"rewards": {"kwargs": {"format_reward": {}}}}, "rewards.kwargs.format_reward", "format_tag_reward"),
        ({"rewards": {"kwargs": {"regex_reward": {"a": 1}}}}, "rewards.kwargs.regex_reward.a", "pattern"),
        ({"rewards": {"timeout": 0}}, "rewards.timeout", ""),
        ({"trainer": {"learning_rat": 1}}, "trainer.learning_rat", "trainer.learning_rate?"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate", ""),
        ({"trainer": {"learning_rate": 1.0, "lr": 2.0}}, "trainer.lr", ""),
        ({"trainer": {"learning_rate": 1.0, "optim": {"lr": 2.0}}}, "trainer.learning_rate", ""),
        ({"trainer": {"bf16": True}, "model": {"name": "a/b", "dtype": "float32"}}, "trainer.bf16", ""),
        ({"trainer": {"optim": "lion"}}, "trainer.optim", "adamw_torch"),
        ({"trainer": {"optim": "sgd", "adam_beta1": 0.9}}, "trainer.adam_beta1", ""),
        ({"trainer": {"lr_scheduler_type": "polynomial"}}, "trainer.lr_scheduler_type", "cosine"),
        ({"trainer": {"lr_scheduler_kwargs": {"power": 2}}}, "trainer.lr_scheduler_kwargs.power", "num_cycles"),
        ({"trainer": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "trainer.warmup_ratio", ""),
        ({"trainer": {"num_train_epochs": 1}}, "trainer.max_steps", ""),
        ({"trainer": {"max_steps": -1}}, "trainer.max_steps", "trainer.num_train_epochs"),
        ({"trainer": {"batch_size": 12}}, "trainer.batch_size", "8"),
        ({"trainer": {"batch_size": 8, "per_device_train_batch_size": 16}}, "trainer.batch_size", ""),
        ({"trainer": {"fp16": True}}, "trainer.fp16", "trainer.bf16"),
        ({"trainer": {"beta": -0.04}}, "trainer.beta", ""),
        ({"trainer": {"beta": 0.1}, "orchestrator": {"algo": {"kl": {"coef": 0.2}}}}, "trainer.beta", ""),
        ({"trainer": {"report_to": "mlflow"}}, "trainer.report_to", "wandb"),
        ({"trainer": {"run_name": "a"}, "storage": {"run_name": "b"}}, "trainer.run_name", ""),
        ({"trainer": {"num_generations": 2}, "generation": {"num_generations": 4}}, "trainer.num_generations", ""),
        ({"orchestrator": {"token_batch_size": 99}, "objective": {"kwargs": {
            "stage2_start_epoch": 1, "stage2_length_penalty_lambda": 1.0}}}, "objective.kwargs.stage2_start_epoch", ""),
        ({"auth": {"hf_tokn": "X"}}, "auth.hf_tokn", "auth.hf_token?"),
        ({"trainer": {"attn_implementation": "flash_attention_2"}}, "trainer.attn_implementation", "trainer.attention"),
        ({"trainer": {"use_liger_kernel": True}}, "trainer.use_liger_kernel", "trainer.lm_head_chunk"),
        ({"trainer": {"deepspeed": "zero3.json"}}, "trainer.deepspeed", "launch.trainer_processes"),
        ({"deepspeed": {"stage": 3}}, "deepspeed", "launch.trainer_processes"),
        ({"model": {"name": "a/b", "attn_implementation": "sdpa"}}, "model.attn_implementation", "trainer.attention"),
    ],
)  # fmt: skip
def test_every_problem_names_the_key_that_was_written(changes: dict[str, Any], key: str, hint: str, tmp_path: Path):
    tree = small(**{key: value for key, value in changes.items() if key != "model"})
    with pytest.raises(ConfigError) as refused:
        load_tree(tmp_path, tree | {key: changes[key] for key in ("model",) if key in changes})
    assert (refused.value.key, str(refused.value.file)) == (key, str(tmp_path / "mine.yaml"))
    assert hint in (refused.value.fix or "")


def test_a_problem_of_the_command_line_is_named_as_its_option(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path, "--trainer.optim", "lion")
    assert (refused.value.key, refused.value.file) == ("--trainer.optim", None)


@pytest.mark.parametrize("token", ["hf_" + "abcdEFGH1234" * 3, "0123456789abcdef" * 3, "not a name"])
def test_a_token_in_the_file_is_refused_and_not_repeated(token: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path, auth={"hf_token": token})
    assert (refused.value.key, refused.value.value) == ("auth.hf_token", None)
    assert token not in str(refused.value)


def test_several_problems_are_reported_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path, objective={"name": "x"}, trainer={"optim": "y", "fp16": True}, data={"provider": "z"})
    assert [error.key for error in refused.value.problems] == [
        "data.provider",
        "objective.name",
        "trainer.optim",
        "trainer.fp16",
    ]
