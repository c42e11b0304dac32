"""Every key of the file with data, rewards and an objective explains itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.cli.config import explanation
from headrace.cli.main import main
from headrace.config.base import ConfigError
from headrace.environments.hackable.registry import DATA_PROVIDERS, OBJECTIVES
from headrace.runfile.explain import explain, keys
from headrace.runfile.hackable.plugins import SENTENCES, explain_kwarg, objective_named, provider_named, reward_named
from headrace.runfile.hackable.sections import HackableConfig
from tests.environments.hackable.files import small


def test_every_key_has_a_type_a_default_and_a_sentence():
    lacking = [
        key
        for key in keys(HackableConfig)
        for entry in explain(HackableConfig, key)
        if not (entry.type and entry.default and entry.sentence)
    ]
    assert lacking == []


def test_every_kwarg_of_an_objective_and_of_a_provider_has_a_sentence_of_its_own():
    plugins = [objective_named(name) for name in OBJECTIVES.names if ":" not in name]
    plugins += [provider_named(name) for name in DATA_PROVIDERS.names if ":" not in name]
    plugins += [reward_named(name) for name in ("length_penalty_reward", "token_utilisation_reward")]
    shipped = [plugin for plugin in plugins if plugin.registry.find(plugin.name).__module__.startswith("headrace.")]
    assert {name for plugin in shipped for name in plugin.parameters} - set(SENTENCES) == set()


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("objective.kwargs.length_penalty_lambda", ("Weight of brevity", "type     number", "default  0.5")),
        ("objective.kwargs.stage2_start_step", ("second stage", "type     whole number or unset", "default  unset")),
        ("objective.name", ("A registered objective", "type     text or unset")),
        ("generation.num_generations", ("type     whole number, at least 1, or unset",)),
        ("data.provider", ("A registered data provider", "type     text or unset")),
        ("data.kwargs.levels", ("of type  gsm8k_math_curriculum, math", "type     list of whole numbers or unset")),
        ("rewards.kwargs.length_penalty_reward.group_size", ("type     whole number or unset",)),
        ("rewards.timeout", ("type     number, above 0", "default  60.0")),
        ("trainer.learning_rate", ("`trainer.optim.lr`.", "type     number, above 0, or unset")),
        ("storage.cache_dir", ("The root", "type     path or unset")),
        ("auth.hf_token", ("The variable that holds", 'default  "HF_TOKEN"')),
        ("objective.kwargs", ("kwargs:", "length_penalty_lambda  ")),
        ("rewards.kwargs.length_penalty_reward", ("count_malformed  Whether the mean",)),
    ],
)
def test_a_key_is_explained(key: str, facts: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--explain", key]) == 0
    out = capsys.readouterr().out
    for fact in facts:
        assert fact in out


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("objective.kwargs.length_penalty_lamda", "objective.kwargs.length_penalty_lambda"),
        ("generation.num_generation", "generation.num_generations"),
        ("rewards.kwargs.length_penalty_reward.groupsize", "rewards.kwargs.length_penalty_reward.group_size"),
    ],
)
def test_an_unknown_one_names_the_nearest(key: str, right: str, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--explain", key]) == 2
    assert capsys.readouterr().err == f"headrace: {key}: unknown key. Did you mean {right}?\n"


def test_a_users_own_plugin_is_explained_by_its_signature(tmp_path: Path):
    tree = small(
        data={"provider": None, "class_path": "tests.environments.hackable.plugins:numbers", "kwargs": {"count": 5}}
    )
    assert explanation(HackableConfig, "data.kwargs.count", tree).splitlines() == [
        "data.kwargs.count",
        "  A kwarg of data provider tests.environments.hackable.plugins:numbers.",
        "  type     whole number",
        "  default  2",
        "  value    5",
    ]
    (entry,) = explain_kwarg(HackableConfig, "rewards.kwargs.tests.environments.hackable.plugins:shouting.weight", None)
    assert (entry.type, entry.default) == ("number", "1.0")
    with pytest.raises(ConfigError, match="unknown key"):
        explain_kwarg(HackableConfig, "data.kwargs.limit", tree)


def test_its_value_in_a_file_is_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(small(generation={"num_generations": 4})))
    assert main(["config", str(file), "--explain", "generation.num_generations"]) == 0
    assert "  value    4" in capsys.readouterr().out
    assert main(["config", str(file), "--explain", "orchestrator.group_size"]) == 0
    assert "  value    4" in capsys.readouterr().out
