"""Sizes of a model from its files, compared with the model itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from headrace.inference.model_shape import read_shape
from headrace.trainer.lora import add_lora
from tests.inference.shapes import QWEN_4B, QWEN_32B
from tests.models.families import make_model, write_model


def test_parameters_are_counted_from_the_headers_and_tied_ones_once(model_directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    shape = read_shape(model_directory)
    assert shape is not None
    assert shape.parameters == model.num_parameters()
    assert shape.sizes.hidden_size == model.config.hidden_size
    assert shape.positions == model.config.max_position_embeddings


def test_without_files_parameters_follow_from_the_sizes(model_directory: Path, tmp_path: Path) -> None:
    shutil.copy(model_directory / "config.json", tmp_path)
    estimated, counted = read_shape(tmp_path), read_shape(model_directory)
    assert estimated is not None
    assert counted is not None
    assert estimated.parameters == pytest.approx(counted.parameters, rel=0.01)  # but for biases and norms of heads


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "granitemoe"])
def test_without_files_all_experts_count(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape is not None
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=0.02)  # but for norms and gates


def test_a_model_with_other_keys_has_no_shape(model_directory: Path, tmp_path: Path) -> None:
    settings = json.loads((model_directory / "config.json").read_text()) | {"hidden_size": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_shape(tmp_path) is None


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("dense", "all-linear"),
        ("dense", ["q_proj", "down_proj"]),
        ("experts", "all-linear"),
        ("experts", ["all-linear", "experts"]),
    ],
)
def test_an_adapter_has_the_parameters_that_the_trainer_adds(
    family: str, targets: str | list[str], model_directory: Path, tmp_path: Path
) -> None:
    directory = model_directory if family == "dense" else write_model(tmp_path, "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(directory)
    add_lora(model, r=4, alpha=8, target_modules=targets)
    shape = read_shape(directory)
    assert shape is not None
    added = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(4, targets) == added


def test_keys_and_values_of_a_token() -> None:
    assert QWEN_4B.kv_bytes(2) == 2 * 36 * 8 * 128 * 2
    assert QWEN_32B.kv_bytes(2) == 2 * 64 * 8 * 128 * 2
