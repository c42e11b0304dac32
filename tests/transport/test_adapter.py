"""Adapter directories: what is read back is what was written, and what we would compute wrongly is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.transport.adapter import (
    Adapter,
    AdapterConfig,
    AdapterError,
    Matrices,
    is_adapter,
    merged,
    read_adapter,
    write_adapter,
)
from tests.refusals import refused

LAYER = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{LAYER}.lora_A.weight"


@pytest.fixture
def adapter() -> Adapter:
    config = AdapterConfig(2, 6, ["q_proj"], use_rslora=False, base_model_name_or_path="some/model")
    return Adapter(config, {LAYER: Matrices(torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(4, 2))})


@pytest.fixture
def directory(adapter: Adapter, tmp_path: Path) -> Path:
    write_adapter(tmp_path, adapter)
    return tmp_path


def change_settings(directory: Path, **settings: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_an_adapter_comes_back_as_it_was(adapter: Adapter, directory: Path):
    assert is_adapter(directory)
    assert not is_adapter(directory.parent)
    found = read_adapter(directory)
    assert found.config == adapter.config
    assert found.layers.keys() == {LAYER}
    assert all(map(torch.equal, found.layers[LAYER], adapter.layers[LAYER]))


def test_the_scaling_is_alpha_over_the_rank_or_its_root():
    assert AdapterConfig(16, 32, []).scaling == 2
    assert AdapterConfig(16, 32, [], use_rslora=True).scaling == 8


def test_merging_is_done_in_float32():
    # 1 + 2 * 2**-10 has no bfloat16: the sum must not be rounded before it is whole
    base = torch.tensor([[1.0]], dtype=torch.bfloat16)
    matrices = Matrices(torch.tensor([[2.0**-5]]), torch.tensor([[2.0**-5]]))
    result = merged(base, matrices, 2.0)
    assert result.dtype == torch.float32
    assert result.item() == 1 + 2 * 2**-10


def test_settings_that_change_nothing_are_accepted(directory: Path):
    change_settings(
        directory,
        **{"lora_dropout": 0.1, "init_lora_weights": True, "megatron_core": "megatron.core", "peft_version": "0.21.2"},
        **{"rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "qalora_group_size": 16, "use_dora": False},
    )
    read_adapter(directory)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"alpha_pattern": {"q_proj": 8}, "rank_pattern": {"q_proj": 8}},
        {"init_lora_weights": "pissa"},
        {"a_feature_of_tomorrow": True},
        {"peft_type": "VERA"},
        {"r": 0},
    ],
)
def test_what_is_more_than_plain_lora_is_refused_by_name(directory: Path, settings: dict[str, Any]):
    change_settings(directory, **settings)
    with refused(AdapterError, file=directory / "adapter_config.json") as error:
        read_adapter(directory)
    assert {problem.key: problem.value for problem in error.value.problems} == settings


def test_a_rank_that_is_not_a_number_or_not_that_of_the_matrices_is_refused(directory: Path):
    change_settings(directory, r="two")
    with refused(AdapterError, file=directory / "adapter_config.json"):
        read_adapter(directory)
    change_settings(directory, r=3)
    with refused(AdapterError, file=directory / "adapter_model.safetensors", key=LAYER):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (KEY, LAYER),
        (f"base_model.model.{LAYER}.lora_magnitude_vector", f"base_model.model.{LAYER}.lora_magnitude_vector"),
        ("base_model.model.lm_head.weight", "base_model.model.lm_head.weight"),
        (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_A.weight"),
    ],
)
def test_tensors_that_are_no_pair_of_matrices_are_refused(directory: Path, name: str, key: str):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    if name in tensors:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(2, 3)
    save_file(tensors, path)
    with refused(AdapterError, file=path, key=key):
        read_adapter(directory)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing_or_broken_is_named(directory: Path, name: str):
    (directory / name).write_bytes(b"no")
    with refused(AdapterError, file=directory / name):
        read_adapter(directory)
    (directory / name).unlink()
    with refused(AdapterError, file=directory / name):
        read_adapter(directory)


def test_an_adapter_without_tensors_is_refused(directory: Path):
    save_file({}, directory / "adapter_model.safetensors")
    with refused(AdapterError, file=directory / "adapter_model.safetensors"):
        read_adapter(directory)
