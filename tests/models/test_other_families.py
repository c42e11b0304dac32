"""Ten random families outside of the table: what is not refused computes what plain transformers computes."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.inference.embedded.loading import load_engine
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.model import PackedModel
from tests.inference.conftest import write_tokenizer
from tests.models.families import FAMILIES, SIZES
from tests.models.test_families import ROUNDING, expected_scores, load_plain, score, sequences

SEED = "HEADRACE_TEST_SEED"
COUNT = 10
MAX_PARAMETERS = 30_000_000
MAX_REFUSAL_S = 5.0


def write_small_model(directory: Path, family: str) -> bool:
    """Write a random model; False for a family that has other sizes than most, or needs more of them."""
    try:
        config = AutoConfig.for_model(family, **{**SIZES, "vocab_size": 300})
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
    except (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        return False
    if size > MAX_PARAMETERS:
        if not any(hasattr(config, key) for key in ("text_config", "vision_config", "audio_config")):
            return False
        config.save_pretrained(directory)  # refused without its weights
        return True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)
    return True


def attempt(load: Callable[[], Any]) -> Any:
    """Return what is loaded, or None if it is refused, with a reason and in time."""
    start = time.process_time()  # other processes of the machine do not count
    try:
        return load()
    except BadInput as error:
        refusal = error.problems[0]
    assert refusal.fact
    assert (refusal.key or "").startswith("model")
    assert time.process_time() - start < MAX_REFUSAL_S
    return None


@pytest.mark.full
def test_other_families_work_or_are_refused_with_a_reason(tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or time.time())
    print(f"{SEED}={seed}")
    others = [family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family not in FAMILIES]
    random.Random(seed).shuffle(others)
    tried = 0
    for family in others:
        directory = tmp_path / family
        if not write_small_model(directory, family):
            continue
        packed = attempt(lambda: PackedModel(directory))  # noqa: B023
        if packed is not None:
            with torch.no_grad():
                found, expected = (
                    score(packed, sequences(), 1.0),
                    expected_scores(load_plain(directory), sequences(), 1.0),
                )
            torch.testing.assert_close(found, expected, atol=10 * ROUNDING, rtol=0, msg=family)
        if (directory / "model.safetensors").exists():
            config = InferenceConfig(max_model_len=64)
            engine = attempt(lambda: load_engine(config, directory, Tokenizer(directory)))  # noqa: B023
            print(f"{family}: training {packed is not None}, embedded engine {engine is not None}")
        tried += 1
        if tried == COUNT:
            return
    raise AssertionError(f"only {tried} families could be built")


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "mllama"])
def test_a_model_with_images_is_refused_as_one(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(BadInput) as error:
        PackedModel(tmp_path)
    assert "multimodal" in error.value.problems[0].fact
