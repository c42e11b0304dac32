"""`[trainer.lora]` and `[lora]` of an SFT run: absent unless asked for, and checked."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.files import dump
from headrace.config.sft import SftConfig
from headrace.runfile.reading import load
from tests.config.run_files import MINIMAL, load_text, refusals, run


def test_every_parameter_is_trained_unless_lora_is_asked_for():
    assert run().trainer.lora is None
    assert run(trainer={"lora": {}}).trainer.lora.model_dump() == {
        "r": 16,
        "alpha": 32,
        "use_rslora": False,
        "target_modules": "all-linear",
        "save_merged": True,
    }


@pytest.mark.parametrize("targets", ['"all-linear"', '["q_proj", "v_proj"]'])
def test_targets_are_all_layers_or_a_list_and_come_back(tmp_path: Path, targets: str):
    config, _ = load_text(tmp_path, MINIMAL, "--trainer.lora.r", "8", "--trainer.lora.target_modules", targets)
    assert config.trainer.lora.r == 8
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(type(config), [tmp_path / "again.toml"])[0] == config


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"r": 0}, "r"),
        ({"alpha": 0}, "alpha"),
        ({"target_modules": "q_proj"}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
    ],
)
def test_a_wrong_key_or_value_is_refused(lora: dict[str, Any], key: str):
    assert {error.key for error in refusals(trainer={"lora": lora})} == {f"trainer.lora.{key}"}


def test_supervised_training_takes_it_too():
    config = SftConfig(max_steps=1, seq_len=8, data={"env": "reverse_text"}, lora={"r": 4})
    assert config.lora is not None and config.lora.r == 4
