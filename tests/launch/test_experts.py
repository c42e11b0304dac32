"""Models with experts, whose weights the embedded engine cannot take from the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.inference.model_shape import EXPERT_KEYS
from headrace.launch.checks import Subject, check_experts
from headrace.runfile.run import RunConfig

FUSED = sorted(
    family
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if any(
        ".experts." in pattern
        for conversion in get_checkpoint_conversion_mapping(family) or ()
        for pattern in conversion.source_patterns
    )
)
"""Families of whose experts transformers makes one tensor."""
COMMON = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")


def keys_of(directory: Path, settings: dict[str, Any], **inference: Any) -> list[str | None]:
    """The keys that the check names for a model with this config.json."""
    (directory / "config.json").write_text(json.dumps(settings))
    config = RunConfig.model_validate(
        {
            "output_dir": directory,
            "max_steps": 1,
            "seq_len": 64,
            "model": {"name": str(directory)},
            "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
            "inference": inference,
        }
    )
    return [problem.key for problem in check_experts(Subject(config, directory, model=directory))]


@pytest.mark.parametrize("family", [*FUSED, "gpt_oss", "granitemoe"])
def test_every_family_counts_its_experts_under_a_key_that_is_looked_at(family: str) -> None:
    assert CONFIG_MAPPING[family]().to_dict().keys() & set(EXPERT_KEYS)


def test_the_families_that_transformers_fuses_are_found() -> None:
    assert set(COMMON) <= set(FUSED)


@pytest.mark.parametrize("family", [*COMMON, "gpt_oss", "granitemoe"])
def test_a_model_with_experts_is_refused_unless_the_engine_is_vllm(family: str, tmp_path: Path) -> None:
    settings = CONFIG_MAPPING[family]().to_dict()
    assert keys_of(tmp_path, settings) == ["model.name"]
    assert keys_of(tmp_path, settings, engine="vllm") == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "olmo2", "phi3"])
def test_a_dense_model_is_not_refused(family: str, tmp_path: Path) -> None:
    assert keys_of(tmp_path, CONFIG_MAPPING[family]().to_dict()) == []


@pytest.mark.parametrize(
    ("count", "keys"), [(None, []), (0, []), (1, []), (2, ["model.name"]), ([8, 8], ["model.name"])]
)
def test_one_expert_is_none_and_a_list_counts_them_by_layer(count: Any, keys: list[str], tmp_path: Path) -> None:
    assert keys_of(tmp_path, {"num_experts": count}) == keys
