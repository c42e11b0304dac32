"""A file with data, rewards and an objective is a run file."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.config import kind_of
from headrace.cli.main import main
from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.launch import set_variables
from headrace.config.sft import SftConfig
from headrace.environments.registry import load_environment
from headrace.launch.saved_config import pin
from headrace.machine import cache_directory
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from tests.environments.hackable.files import SPEC, load_tree, run_of, small, write_store


def test_the_file_of_the_page_is_a_run(tmp_path: Path):
    store = write_store(tmp_path)
    file = tmp_path / "lengths.yaml"
    file.write_text(SPEC.replace("STORE", str(store)))
    config, notices = load(RunConfig, [file])
    assert notices == []
    assert (config.max_steps, config.seq_len, config.trainer.optim.lr) == (20, 1024, 1e-5)
    assert config.output_dir == store / "artifacts" / "runs" / "lengths"
    assert config.model.name == str(store / "models" / "tiny")
    orchestrator = config.orchestrator
    assert (orchestrator.group_size, orchestrator.batch_size, orchestrator.algo.type) == (4, 64, "grpo")
    assert (orchestrator.train.sampling.max_tokens, orchestrator.train.sampling.temperature) == (512, 1.0)
    (env,) = orchestrator.train.env
    assert (env.id, env.name, orchestrator.eval.env) == ("hackable", "gsm8k", [])
    assert env.args == {
        "provider": "gsm8k",
        "provider_kwargs": {"source": str(store / "datasets" / "train.jsonl")},
        "objective": "token_grpo",
        "objective_kwargs": yaml.safe_load(SPEC)["objective"]["kwargs"],
        "reward_kwargs": {
            "length_penalty_reward": {
                "tokenizer_name": str(store / "models" / "tiny"),
                "group_size": 4,
                "cache_dir": str(store / "models"),
            }
        },
        "seed": 0,
        "groups_per_step": 16.0,
    }
    assert config.launch.env == {
        "HEADRACE_CACHE": str(store),
        "HF_HOME": str(store / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    assert config.launch.storage_root == store


def test_what_it_comes_to_is_a_run_file_that_says_the_same(tmp_path: Path):
    tree = small(data={"eval": {"kwargs": {"split": "eval"}}}, wandb={}, storage={"cache_dir": "store"})
    config, _ = load_tree(tmp_path, tree)
    again = tmp_path / "again.toml"
    again.write_text(dump(config))
    assert load(RunConfig, [again])[0] == config


def test_toml_will_do(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('model = "org/model"\n[data]\nprovider = "arithmetic"\n[trainer]\nmax_steps = 3\n')
    config, _ = load(RunConfig, [file])
    assert (config.max_steps, config.orchestrator.train.env[0].name) == (3, "arithmetic")


def test_overrides_set_keys_of_either_form(tmp_path: Path):
    config = run_of(tmp_path, "--objective.kwargs.length_penalty_lambda", "0.25", "--orchestrator.max_async_level", "0")
    assert config.orchestrator.train.env[0].args["objective_kwargs"] == {"length_penalty_lambda": 0.25}
    assert config.orchestrator.max_async_level == 0


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"orchestrator": {"group_size": 2}, "generation": {"num_generations": 4}}, "orchestrator.group_size", 2),
        ({"max_steps": 3}, "max_steps", 3),
        ({"seed": 5, "trainer": {"seed": 4}}, "seed", 5),
        ({"trainer": {"seed": 4}}, "trainer.seed", 4),
        ({"seq_len": 100}, "seq_len", 100),
        ({"output_dir": "elsewhere"}, "output_dir", Path("elsewhere")),
        ({"orchestrator": {"batch_size": 24}}, "orchestrator.batch_size", 24),
        ({"launch": {"env": {"HF_HUB_OFFLINE": "0"}}}, "launch.env", {"HF_HUB_OFFLINE": "0"}),
        ({"trainer": {"loss": {"type": "gspo"}}}, "trainer.loss.type", "gspo"),
        ({"trainer": {"optim": {"type": "muon"}, "learning_rate": 1e-4}}, "trainer.optim.type", "muon"),
    ],
)
def test_sections_of_a_run_file_stand_beside_and_win(changes: dict[str, Any], key: str, value: Any, tmp_path: Path):
    assert at(run_of(tmp_path, **changes), key) == value


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"trainer": {"learning_rate": "1e-5"}}, "trainer.optim.lr", 1e-5),
        ({"trainer": {"lr": 1e-5}}, "trainer.optim.lr", 1e-5),
        ({"trainer": {"optim": "adamw_torch_fused"}}, "trainer.optim.type", "adamw"),
        ({"trainer": {"optimizer": "SGD"}}, "trainer.optim.type", "sgd"),
        ({"trainer": {"adam_beta2": 0.95}}, "trainer.optim.betas", (0.9, 0.95)),
        ({"trainer": {"weight_decay": "0.1", "max_grad_norm": 0.5}}, "trainer.optim.weight_decay", 0.1),
        ({"trainer": {"lr_scheduler_type": "constant_with_warmup"}}, "trainer.scheduler.type", "constant"),
        ({"trainer": {"lr_scheduler_type": "warmup_stable_decay"}}, "trainer.scheduler.type", "wsd"),
        ({"trainer": {"scheduler": "linear", "warmup_steps": 2}}, "trainer.scheduler.warmup_steps", 2),
        ({"trainer": {"warmup_ratio": 0.25}}, "trainer.scheduler.warmup_steps", 3),  # of 10, rounded up
        ({"trainer": {"warmup_ratio": 0.1, "max_steps": 30}}, "trainer.scheduler.warmup_steps", 3),
        ({"trainer": {"save_steps": 7}}, "trainer.ckpt.interval", 7),
        ({"trainer": {"save_total_limit": 1}}, "trainer.ckpt.keep_last", 1),
        ({"trainer": {"permanent_save_steps": 20}}, "trainer.ckpt.permanent_interval", 20),
        ({"trainer": {"bf16": True}}, "model.dtype", "bfloat16"),
        ({"trainer": {"bf16": False, "fp16": False}}, "model.dtype", "float32"),
        ({"trainer": {"gradient_checkpointing": True}}, "trainer.activation_checkpointing", "full"),
        ({"trainer": {"epsilon": 0.2, "epsilon_high": 0.28}}, "trainer.loss.eps_high", 0.28),
        ({"trainer": {"epsilon": 0.1}}, "trainer.loss.eps_high", 0.1),
        ({"trainer": {"use_vllm": True}}, "inference.engine", "vllm"),
        ({"trainer": {"num_generations": 4, "max_completion_length": 64}}, "orchestrator.group_size", 4),
        ({"trainer": {"batch_size": "32"}}, "orchestrator.batch_size", 32),
        ({"trainer": {"lora": {"r": 4}}}, "trainer.lora.r", 4),
        ({"trainer": {"beta": 0.0}}, "trainer.reference", None),
        ({"trainer": {"beta": 0.04}}, "orchestrator.algo.kl.coef", 0.04),
        ({"trainer": {"beta": 0.04}}, "orchestrator.algo.kl.estimator", "k3"),
        ({"trainer": {"beta": 0.04}}, "trainer.reference.every", None),
        ({"trainer": {"beta": 0.04}, "orchestrator": {"algo": "max_rl"}}, "orchestrator.algo.kl.coef", 0.04),
        ({"model": {"name_or_path": "org/other", "lora": {"r": 2}}}, "trainer.lora.r", 2),
        ({"model": {"model_name_or_path": "org/other"}}, "model.name", "org/other"),
        ({"generation": {"max_new_tokens": 100, "max_prompt_length": 28}}, "seq_len", 128),
        ({"generation": {"top_k": 0, "top_p": 0.9}}, "orchestrator.train.sampling.top_k", -1),
        ({"generation": {"min_p": "0.05"}}, "orchestrator.train.sampling.min_p", 0.05),
    ],
)
def test_usual_names_become_ours(changes: dict[str, Any], key: str, value: Any, tmp_path: Path):
    if "model" in changes:
        assert at(load_tree(tmp_path, {**small(), **changes})[0], key) == value
    else:
        assert at(run_of(tmp_path, **changes), key) == value


def test_a_cosine_with_restarts_has_its_cycles_and_where_they_end(tmp_path: Path):
    kwargs = {"num_cycles": 3, "min_lr": 1e-6}
    trainer = {"learning_rate": 1e-5, "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": kwargs}
    scheduler = run_of(tmp_path, trainer=trainer).trainer.scheduler
    assert scheduler.model_dump() == {
        "type": "cosine_with_restarts",
        "warmup_steps": 0,
        "min_factor": pytest.approx(0.1),
        "cycles": 3,
    }


def test_a_batch_is_what_all_devices_have_in_all_passes(tmp_path: Path):
    trainer = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": "6"}
    config = run_of(tmp_path, trainer=trainer, launch={"trainer_processes": 2}, generation={"num_generations": 6})
    assert config.orchestrator.batch_size == 48
    assert config.orchestrator.train.env[0].args["groups_per_step"] == 8.0


def test_epochs_are_counted_in_samples(tmp_path: Path):
    data = {"kwargs": {"num_tasks": 50}}
    config = run_of(tmp_path, data=data, trainer={"max_steps": -1, "num_train_epochs": 1.5})
    assert config.max_steps == 5  # 75 prompts in steps of 16, the last one not full


def test_numbers_in_texts_are_numbers_to_plugins(tmp_path: Path):
    objective = {"correctness_weight": "2", "strict_format_gate": "true", "stage2_start_epoch": None}
    changes = {"data": {"kwargs": {"num_tasks": "12", "operations": "+"}}, "objective": {"kwargs": objective}}
    args = run_of(tmp_path, **changes).orchestrator.train.env[0].args
    assert args["provider_kwargs"] == {"num_tasks": 12, "operations": "+"}
    assert args["objective_kwargs"] == {"correctness_weight": 2.0, "strict_format_gate": True}


def test_null_takes_back_what_an_earlier_file_said(tmp_path: Path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(small(data={"provider": "gsm8k", "kwargs": {"source": "x", "limit": 3}})))
    own = {
        "provider": None,
        "class_path": "tests.environments.hackable.plugins:numbers",
        "kwargs": {"source": None, "limit": None},
    }
    second.write_text(yaml.safe_dump({"data": own, "generation": None}))
    config, _ = load(RunConfig, [first, second])
    (env,) = config.orchestrator.train.env
    assert (env.name, env.args["provider_kwargs"]) == ("numbers", {})
    assert config.output_dir == Path("outputs/second")


def test_evaluation_has_what_training_has_unless_it_says_otherwise(tmp_path: Path):
    evaluated = {"kwargs": {"split": "eval"}, "interval": 5, "num_generations": 4, "temperature": 0.6}
    data = {"kwargs": {"digits": 1}, "eval": evaluated}
    config = run_of(tmp_path, data=data, generation={"max_new_tokens": 32, "temperature": 0.9})
    section = config.orchestrator.eval
    (env,) = section.env
    assert env.args["provider_kwargs"] == {"digits": 1, "split": "eval"}
    assert env.args["trained_on"] == {"provider": "arithmetic", "kwargs": {"digits": 1}}
    assert (section.interval, section.group_size) == (5, 4)
    assert (section.sampling.temperature, section.sampling.max_tokens) == (0.6, 32)


def test_data_of_another_provider_has_none_of_its_kwargs(tmp_path: Path):
    data = {"kwargs": {"digits": 1}, "eval": {"class_path": "tests.environments.hackable.plugins:numbers"}}
    (env,) = run_of(tmp_path, data=data).orchestrator.eval.env
    assert (env.name, env.args["provider_kwargs"]) == ("numbers", {})


def test_a_provider_that_declares_its_order_is_drawn_in_order(tmp_path: Path):
    curriculum = run_of(tmp_path, data={"provider": "gsm8k_math_curriculum"}).orchestrator.train.env[0].curriculum
    assert curriculum.sampler is not None and curriculum.sampler.type == "in_order"
    assert run_of(tmp_path).orchestrator.train.env[0].curriculum.sampler is None


def test_the_providers_of_a_curriculum_are_found_and_checked_as_one_alone_is(tmp_path: Path):
    store = write_store(tmp_path)
    parts = [{"provider": "gsm8k", "kwargs": {"source": "train.jsonl", "limit": "1"}}, {"provider": "arithmetic"}]
    data = {"provider": "curriculum", "kwargs": {"providers": parts}}
    config = run_of(tmp_path, data=data, model="tiny", storage={"cache_dir": str(store)})
    (env,) = config.orchestrator.train.env
    assert env.args["provider_kwargs"]["providers"] == [
        {"provider": "gsm8k", "kwargs": {"source": str(store / "datasets" / "train.jsonl"), "limit": 1}},
        {"provider": "arithmetic", "kwargs": {}},
    ]
    assert env.curriculum.sampler is not None and env.curriculum.sampler.type == "in_order"
    assert config.launch.env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"provider": "gsm9k"}, "data.kwargs.providers.0.provider"),
        ({"provider": "gsm8k", "kwargs": {"sources": "x"}}, "data.kwargs.providers.0.kwargs.sources"),
        ({"provider": "gsm8k", "share": -1}, "data.kwargs.providers.0.share"),
    ],
)
def test_what_is_wrong_with_a_part_of_a_curriculum_is_named_by_its_key(tmp_path: Path, part: Any, key: str):
    with pytest.raises(ConfigError) as error:
        run_of(tmp_path, data={"provider": "curriculum", "kwargs": {"providers": [part]}})
    assert key in str(error.value)


def test_environments_of_the_run_file_stand_beside_the_one_that_is_made(tmp_path: Path):
    data = {"provider": "arithmetic", "ratio": 3}
    config = run_of(tmp_path, data=data, orchestrator={"train": {"env": [{"id": "copy", "ratio": 1}]}})
    assert [(env.id, env.ratio) for env in config.orchestrator.train.env] == [("hackable", 3), ("copy", 1)]


def test_a_relative_path_is_beside_the_file_or_under_the_storage_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = write_store(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = {"provider": "local", "kwargs": {"path": "train.jsonl"}}
    changes = {"data": data, "storage": {"cache_dir": "../store"}, "output_dir": "mine"}
    path = run_of(tmp_path, **changes).orchestrator.train.env[0].args["provider_kwargs"]["path"]
    assert path == str(store / "datasets" / "train.jsonl")
    (tmp_path / "train.jsonl").write_text("")
    config = run_of(tmp_path, **changes)
    assert config.orchestrator.train.env[0].args["provider_kwargs"]["path"] == str(tmp_path / "train.jsonl")
    assert config.output_dir == store / "mine"


@pytest.mark.parametrize("root", ["cache", "./cache", "../here/cache", "ABSOLUTE"])
def test_a_path_that_names_the_storage_root_is_not_put_under_it_again(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = tmp_path / "here"
    cache = here / "cache"
    (cache / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(here)
    root = root.replace("ABSOLUTE", str(cache))
    (tmp_path / "files").mkdir()

    def loaded(prefix: str) -> tuple[object, ...]:
        reward = {"tokenizer_name": f"{prefix}models/tiny", "cache_dir": f"{prefix}models"}
        config = run_of(
            tmp_path / "files",
            model=f"{prefix}models/tiny",
            objective={"kwargs": {"enable_length_penalty": True}},
            rewards={"kwargs": {"length_penalty_reward": reward}},
            storage={"cache_dir": root},
            output_dir=f"{prefix}artifacts/runs/mine",
        )
        assert config.output_dir is not None
        kwargs = config.orchestrator.train.env[0].args["reward_kwargs"]["length_penalty_reward"]
        places = [config.model.name, kwargs["tokenizer_name"], kwargs["cache_dir"], config.output_dir.resolve()]
        return tuple(str(place) for place in places)

    expected = (*[str(cache / "models" / "tiny")] * 2, str(cache / "models"), str(cache / "artifacts/runs/mine"))
    assert loaded("") == loaded(f"{root}/") == expected


def test_a_model_that_the_run_makes_is_kept_among_the_models_of_its_storage_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HEADRACE_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    config = run_of(tmp_path, storage={"cache_dir": str(tmp_path / "root")})
    set_variables(config.launch)
    assert cache_directory() / "models" == tmp_path / "root" / "models"


def test_a_run_is_offline_unless_something_is_to_be_had_from_the_hub_alone(tmp_path: Path):
    write_store(tmp_path)
    local = {"storage": {"cache_dir": str(tmp_path / "store")}, "model": "tiny"}
    arithmetic = {**small(), **local}
    offline = "HF_HUB_OFFLINE"
    assert load_tree(tmp_path, arithmetic)[0].launch.env[offline] == "1"
    assert offline not in load_tree(tmp_path, {**arithmetic, "model": "org/model"})[0].launch.env
    assert offline not in load_tree(tmp_path, {**arithmetic, "data": {"provider": "gsm8k"}})[0].launch.env
    rewards = {"kwargs": {"length_penalty_reward": {"tokenizer_name": "org/model"}}}
    brief = {"kwargs": {"enable_length_penalty": True}}
    assert offline not in load_tree(tmp_path, {**arithmetic, "objective": brief, "rewards": rewards})[0].launch.env
    assert offline in load_tree(tmp_path, {**arithmetic, "objective": {}, "rewards": rewards})[0].launch.env  # idle
    asked = {**arithmetic, "storage": {**local["storage"], "offline": False}}
    assert offline not in load_tree(tmp_path, asked)[0].launch.env


def test_trackers_are_asked_for_by_name_and_keep_their_files_in_the_storage_root(tmp_path: Path):
    config = run_of(tmp_path, trainer={"report_to": ["wandb", "tensorboard"]}, storage={"cache_dir": str(tmp_path)})
    assert config.wandb is not None and config.wandb.dir == tmp_path / "logs"  # it makes `wandb/` there
    assert config.tensorboard is not None
    assert run_of(tmp_path, trainer={"report_to": "none"}).wandb is None


@pytest.mark.parametrize(
    ("offline", "wandb", "mode"),
    [
        (True, {}, "offline"),
        (True, {"mode": "online"}, "offline"),
        (True, {"mode": "disabled"}, "disabled"),
        (False, {}, "online"),
        (None, {}, "online"),  # the tracker is asked for, though the hub is not
    ],
)
def test_storage_offline_reaches_wandb(offline: bool | None, wandb: dict[str, str], mode: str, tmp_path: Path):
    config, notices = load_tree(tmp_path, small(wandb=wandb, storage={"offline": offline}))
    assert config.wandb is not None and config.wandb.mode == mode
    assert [notice.partition(" ")[0] for notice in notices] == ["wandb.mode"] * (wandb == {"mode": "online"})
    assert run_of(tmp_path, storage={"offline": True}).wandb is None


def test_tokens_go_by_the_names_of_their_variables(tmp_path: Path):
    config = run_of(tmp_path, auth={"hf_token": "MY_TOKEN", "wandb_api_key": "WANDB_API_KEY"})
    assert config.launch.env_from == {"HF_TOKEN": "MY_TOKEN"}


def test_the_tokenizer_is_that_of_the_model_that_is_trained(tmp_path: Path):
    config = run_of(tmp_path, data={"eval": {}})
    assert "tokenizer_name" not in config.orchestrator.train.env[0].args
    pinned = pin(config, tmp_path, "/models/made").orchestrator
    for env in (*pinned.train.env, *pinned.eval.env):
        assert env.args["tokenizer_name"] == "/models/made"


def test_without_a_tokenizer_words_are_counted_also_after_the_file_was_saved(tmp_path: Path):
    objective = {"kwargs": {"enable_length_penalty": True}}
    rewards = {"kwargs": {"length_penalty_reward": {"tokenizer_name": None}}}
    args = run_of(tmp_path, objective=objective, rewards=rewards).orchestrator.train.env[0].args
    assert args["reward_kwargs"] == {"length_penalty_reward": {"tokenizer_name": ""}}


def test_keys_that_say_nothing_here_are_ignored_with_a_word(tmp_path: Path):
    trainer = {"logging_steps": 1, "remove_unused_columns": False, "optim": "paged_adamw_8bit"}
    _, notices = load_tree(tmp_path, small(trainer=trainer))
    assert notices[0] == "trainer.logging_steps: ignored, since every step is logged."
    assert notices[1].startswith("trainer.remove_unused_columns: ignored")
    assert notices[2].startswith("trainer.optim is paged_adamw_8bit: it is AdamW with a state in float32")


def test_plugins_lie_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # where it is set, a model that is not here is refused
    (tmp_path / "own_run_file.py").write_text(
        "from headrace.environments.hackable import Objective, TrainingSample\n"
        "def two(first='a'):\n    yield TrainingSample(first, '1')\n    yield TrainingSample('b', '2')\n"
        "def short(text, data, limit=5):\n    return len(text) < limit\n"
        "class Short(Objective):\n    algorithm = 'max_rl'\n"
        "    def reward_names(self):\n        return ['own_run_file.py:short']\n"
        "    def combine_rewards(self, scores, samples):\n        return scores['own_run_file.py:short']\n"
    )
    tree = {
        "model": "org/model",
        "data": {"class_path": "own_run_file.py:two", "kwargs": {"first": "x"}},
        "objective": {"class_path": "own_run_file:Short"},
        "rewards": {"kwargs": {"own_run_file.py:short": {"limit": "7"}}},
        "trainer": {"num_train_epochs": 8},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    assert main(["rl", str(tmp_path / "mine.yaml"), "--dry-run"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    config, _ = load(RunConfig, [tmp_path / "mine.toml"])
    (env,) = config.orchestrator.train.env
    assert (env.name, config.max_steps, config.orchestrator.algo_of(env).type) == ("two", 1, "max_rl")
    assert env.args["reward_kwargs"] == {"own_run_file.py:short": {"limit": 7}}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("data: {provider: gsm8k}", RunConfig),
        ("data: {class_path: 'a:b'}", RunConfig),
        ("data: {name: org/set}\nobjective: {}", RunConfig),
        ("data: {path: a.jsonl}", SftConfig),
    ],
)
def test_only_a_file_with_examples_and_nothing_to_reward_is_supervised(text: str, kind: type, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    assert kind_of([tmp_path / "mine.yaml"]) is kind


PAGE = (Path(__file__).parents[3] / "docs" / "how-to/hacking.md").read_text().partition("## The run file")[2]


def test_the_file_and_the_commands_of_the_page_are_right(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "store" / "models" / "Qwen3-0.6B")
    data = tmp_path / "store" / "datasets" / "gsm8k"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "brief.yaml").write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    commands = [line for line in PAGE.partition("```bash\n")[2].splitlines() if line.startswith("headrace ")][:4]
    assert len(commands) == 4
    for command in commands:
        words = command.split()[1:]
        arguments = words if words[0] == "config" or "--dry-run" in words else [*words, "--dry-run"]
        assert main(arguments) == 0
        assert "length_penalty_lambda" in capsys.readouterr().out
    config, _ = load(RunConfig, [Path("brief.yaml")])
    assert (config.orchestrator.batch_size, config.trainer.scheduler.warmup_steps) == (64, 10)
    assert config.launch.env["HF_HUB_OFFLINE"] == "1"


def test_the_environment_of_the_page_is_one():
    section = tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])
    (env,) = section["orchestrator"]["train"]["env"]
    assert len(load_environment(env["id"], env["args"]).tasks()) == 184  # type: ignore[arg-type]
