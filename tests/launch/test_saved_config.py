"""The configuration that a run directory keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError
from headrace.config.files import dump_sealed
from headrace.config.sft import SftConfig
from headrace.launch.saved_config import (
    changes,
    evaluation_directory,
    pin,
    read_rl_run,
    read_run,
    read_sampled_run,
    save,
)
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir
from tests.refusals import refused

TEXT = """
output_dir = "outputs/x"
max_steps = 3
seq_len = 64
[model]
sft = "sft.toml"
[[orchestrator.train.env]]
id = "reverse-text"
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "rl.toml"
    path.write_text(TEXT)
    return load(RunConfig, [path])[0]


def test_a_saved_run_names_its_model_once_and_its_directory_absolutely(config: RunConfig, tmp_path: Path) -> None:
    pinned = pin(config, tmp_path / "run", str(tmp_path / "model"))
    for section in (pinned, pinned.trainer, pinned.orchestrator, pinned.inference):
        assert section.model.name == str(tmp_path / "model")
        assert section.model.sft is None
        assert section.output_dir == tmp_path / "run"


def test_a_saved_run_reads_back_the_same(config: RunConfig, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    pinned = pin(config, run.root, "model")
    save(pinned, run)
    assert read_run(run.root) == pinned
    assert read_rl_run(run.config) == pinned
    assert dump_sealed(read_rl_run(run.root)) == run.config.read_text()
    run.config.write_text(run.config.read_text().replace("seq_len", "seq_lem", 1))
    with pytest.raises(ConfigError) as changed:
        read_run(run.root)
    assert changed.value.file == run.config


def test_infinity_and_nan_in_args_of_an_environment_are_saved(config: RunConfig, tmp_path: Path) -> None:
    config.orchestrator.train.env[0].args = {"longest": math.inf, "none": math.nan}
    save(pin(config, tmp_path / "run", "model"), RunDir(tmp_path / "run"))
    saved = read_rl_run(tmp_path / "run").orchestrator.train.env[0].args
    assert saved["longest"] == math.inf and math.isnan(saved["none"])


def test_a_run_directory_that_was_moved_is_where_it_is_now(config: RunConfig, tmp_path: Path) -> None:
    save(pin(config, tmp_path / "before", "model"), RunDir(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    assert read_rl_run(tmp_path / "after").trainer.output_dir == tmp_path / "after"


def test_evaluation_goes_below_the_storage_root_of_the_run(config: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(pin(config, run, "model"), RunDir(run))
    assert evaluation_directory(run, "gsm8k") == evaluation_directory(None, "gsm8k") == Path("outputs/eval/gsm8k")
    config.launch.env = {"HEADRACE_CACHE": str(tmp_path / "root")}
    save(pin(config, run, "model"), RunDir(run))
    assert evaluation_directory(run, "mine:Env") == tmp_path / "root/artifacts/eval/mine-Env"


def test_changes_are_listed_by_key_and_shared_keys_once(config: RunConfig, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    pinned = pin(config, run.root, "model")
    save(pinned, run)
    assert changes(pinned, run) == []
    tree = pinned.model_dump(mode="json", exclude_none=True)
    tree["max_steps"] = tree["trainer"]["max_steps"] = tree["orchestrator"]["max_steps"] = 9
    for section in (tree, tree["trainer"], tree["orchestrator"], tree["inference"]):
        section["model"]["name"] = "other"
    tree["trainer"]["optim"]["lr"] = 0.5
    tree["orchestrator"]["train"]["env"][0]["ratio"] = 2.0
    assert changes(RunConfig.model_validate(tree), run) == [
        "max_steps: 3 -> 9",
        "model.name: model -> other",
        "trainer.optim.lr: 1e-06 -> 0.5",
        "orchestrator.train.env.0.ratio: unset -> 2.0",
    ]


def test_a_saved_sft_run_finds_its_data_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    data: dict[str, Any] = {"max_steps": 1, "seq_len": 8, "data": {"name": "set"}, "validation": {"path": "b.jsonl"}}
    pinned = pin(SftConfig.model_validate(data), tmp_path / "run", "model")
    assert pinned.data.name == str(tmp_path / "set")
    assert pinned.validation is not None and pinned.validation.path == tmp_path / "b.jsonl"
    data["data"]["name"] = "openai/gsm8k"
    assert pin(SftConfig.model_validate(data), tmp_path / "run", "model").data.name == "openai/gsm8k"


def test_only_an_sft_run_that_evaluates_has_an_orchestrator_and_a_server(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"max_steps": 1, "seq_len": 8, "data": {"env": "reverse-text"}}
    run = RunDir(tmp_path / "run")
    save(pin(SftConfig.model_validate(tree), run.root, "model"), run)
    with refused(ConfigError, key="RUN"):
        read_sampled_run(run.root)
    tree["eval"] = {"env": [{"id": "reverse-text"}]}
    save(pin(SftConfig.model_validate(tree), run.root, "model"), run)
    config = read_sampled_run(run.root)
    assert isinstance(config, SftConfig) and config.server().output_dir == run.root
