"""What is wrong with a file of data, rewards and an objective is told by the key that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from tests.hackable.files import load_tree, run_of, small


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objectiv": {}, "storage": {}}, "objectiv: unknown key. Did you mean objective?"),
        ({"generation": {"num_generation": 2}}, "Did you mean generation.num_generations?"),
        ({"generation": {"temperature": 0}}, "generation.temperature = "),
        ({"generation": {"repetition_penalty": 1.1}}, "generation.repetition_penalty is 1.1, which"),
        ({"objective": {"name": "token_grp"}}, "objective.name: no objective 'token_grp'. There is token_grpo"),
        ({"objective": {"class_path": "no_such:Thing"}}, "objective.class_path: objective 'no_such:Thing' cannot be"),
        ({"objective": {"class_path": "Thing"}}, "objective: class_path 'Thing' is not an import path"),
        ({"objective": {"name": "a", "class_path": "b:C"}}, "objective: give name or class_path, not both"),
        ({"objective": {"kwargs": {"reward_mod": 1}}}, "Did you mean objective.kwargs.reward_mode?"),
        ({"objective": {"kwargs": {"reward_mode": "x"}}}, "objective.kwargs.reward_mode must be 'additive' or"),
        ({"objective": {"kwargs": {"stage2_start_step": 2}}}, "objective.kwargs: a second stage needs"),
        ({"data": {"provider": "gsm"}}, "data.provider: no data provider 'gsm'. There is gsm8k"),
        ({"data": {"kwargs": {"digit": 2}}}, "Did you mean data.kwargs.digits?"),
        ({"data": {"provider": "local"}}, "data.kwargs.path: required, and not set"),
        ({"data": {"eval": {"kwargs": {"digit": 2}}}}, "Did you mean data.eval.kwargs.digits?"),
        ({"rewards": {"kwargs": {"format_reward": {}}}}, "rewards.kwargs.format_reward: no reward 'format_reward'"),
        ({"rewards": {"kwargs": {"regex_reward": {"a": 1}}}}, "rewards.kwargs.regex_reward.a: unknown key."),
        ({"rewards": {"timeout": 0}}, "rewards.timeout = "),
        ({"trainer": {"learning_rat": 1}}, "trainer.learning_rat: unknown key. Did you mean trainer.learning_rate?"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate = "),
        ({"trainer": {"learning_rate": 1.0, "lr": 2.0}}, "trainer.lr is 2.0, but trainer.learning_rate is 1.0"),
        ({"trainer": {"learning_rate": 1.0, "optim": {"lr": 2.0}}}, "trainer.learning_rate is 1.0, but trainer.optim"),
        ({"trainer": {"bf16": True}, "model": {"name": "a/b", "dtype": "float32"}}, "but model.dtype is 'float32'"),
        ({"trainer": {"optim": "lion"}}, "trainer.optim: no optimizer 'lion'"),
        ({"trainer": {"optim": "sgd", "adam_beta1": 0.9}}, "trainer.adam_beta1: sgd has no such thing"),
        ({"trainer": {"lr_scheduler_type": "polynomial"}}, "trainer.lr_scheduler_type: no schedule 'polynomial'"),
        ({"trainer": {"lr_scheduler_kwargs": {"power": 2}}}, "trainer.lr_scheduler_kwargs.power: not known here"),
        ({"trainer": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "trainer.warmup_steps and trainer.warmup_ratio"),
        ({"trainer": {"num_train_epochs": 1}}, "trainer.max_steps and trainer.num_train_epochs both"),
        ({"trainer": {"max_steps": -1}}, "trainer.max_steps: a run needs an end"),
        ({"trainer": {"batch_size": 12}}, "trainer.batch_size: 12 completions of a step are not whole groups"),
        ({"trainer": {"batch_size": 8, "per_device_train_batch_size": 16}}, "come to 16: give one"),
        ({"trainer": {"fp16": True}}, "trainer.fp16: float16 is not trained in"),
        ({"trainer": {"beta": 0.04}}, "trainer.beta is 0.04: there is no penalty for leaving the first policy"),
        ({"trainer": {"report_to": "mlflow"}}, "trainer.report_to: no tracker 'mlflow'"),
        ({"trainer": {"run_name": "a"}, "storage": {"run_name": "b"}}, "trainer.run_name and storage.run_name differ"),
        ({"trainer": {"num_generations": 2}, "generation": {"num_generations": 4}}, "trainer.num_generations is 2"),
        ({"orchestrator": {"token_batch_size": 99}, "objective": {"kwargs": {
            "stage2_start_epoch": 1, "stage2_length_penalty_lambda": 1.0}}}, "objective.kwargs.stage2_start_epoch: "),
        ({"auth": {"hf_tokn": "X"}}, "Did you mean auth.hf_token?"),
    ],
)  # fmt: skip
def test_every_problem_names_the_key_that_was_written(changes: dict[str, Any], words: str, tmp_path: Path):
    tree = small(**{key: value for key, value in changes.items() if key != "model"})
    with pytest.raises(ConfigError) as refused:
        load_tree(tmp_path, tree | {key: changes[key] for key in ("model",) if key in changes})
    assert str(refused.value).startswith(f"{tmp_path / 'mine.yaml'}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize("token", ["hf_" + "abcdEFGH1234" * 3, "0123456789abcdef" * 3, "not a name"])
def test_a_token_in_the_file_is_refused_and_not_repeated(token: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"auth\.hf_token: the name of the environment variable") as refused:
        run_of(tmp_path, auth={"hf_token": token})
    assert token not in str(refused.value)


def test_several_problems_are_told_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        run_of(tmp_path, objective={"name": "x"}, trainer={"optim": "y", "beta": 1}, data={"provider": "z"})
    told = [line.partition(": ")[2] for line in str(refused.value).splitlines()]
    assert [line.partition(":")[0].partition(" ")[0] for line in told] == [
        "data.provider",
        "objective.name",
        "trainer.optim",
        "trainer.beta",
    ]
