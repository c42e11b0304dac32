"""Which models the engine takes, and what it refuses at load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import (
    UnsupportedModel,
    check_engine,
    eos_token_ids,
    load_model,
    max_model_len,
    refuse_unsupported,
)
from headrace.rollout.version import Version
from tests.inference.plain_forward import plain_logprobs

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_loaded_model_passes_its_check_and_is_ready(model_directory: Path) -> None:
    model = load_model(model_directory)
    refuse_unsupported(model)
    engine = Engine(model, max_model_len=64)
    check_engine(engine)
    assert not engine.has_work
    assert engine.tokens_sampled == 0
    assert model.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_a_loaded_model_computes_what_was_saved_and_takes_updates(
    model_directory: Path, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    tokens = list(range(20, 40))
    model = load_model(model_directory, "float32").cpu()
    torch.testing.assert_close(plain_logprobs(model, tokens), plain_logprobs(make_model(0), tokens), atol=1e-5, rtol=0)
    Engine(model, max_model_len=64).update_weights(publish(make_model(1), Version(0, 1)), Version(0, 1))
    torch.testing.assert_close(plain_logprobs(model, tokens), plain_logprobs(make_model(1), tokens), atol=1e-5, rtol=0)


def test_chunked_attention_is_refused_by_name() -> None:
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=2)
    with pytest.raises(UnsupportedModel, match="Llama4ForCausalLM has chunked_attention layers"):
        refuse_unsupported(AutoModelForCausalLM.from_config(config))


def test_attention_that_the_engine_lacks_is_found_by_the_check() -> None:
    config = transformers.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    engine = Engine(AutoModelForCausalLM.from_config(config), max_model_len=64)
    with pytest.raises(UnsupportedModel, match=r"cannot run GptOssForCausalLM.*attention sinks"):
        check_engine(engine)


def test_a_model_that_computes_something_else_is_found_by_the_check(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_model_len=64)
    monkeypatch.setattr(
        "headrace.inference.embedded.kv_cache._visible", lambda positions, keys, _: keys <= 0 * positions
    )
    with pytest.raises(UnsupportedModel, match="does not reproduce Qwen3ForCausalLM"):
        check_engine(engine)


def test_the_context_limit_is_the_models_own_unless_set_lower(model: Any) -> None:
    assert max_model_len(model, None) == 256
    assert max_model_len(model, 64) == 64
    with pytest.raises(UnsupportedModel) as refused:
        max_model_len(model, 512)
    assert str(refused.value) == (
        "max_model_len = 512, but the model's max_position_embeddings is 256: set inference.max_model_len to 256 or "
        "less; where a run does not set it, it follows from seq_len"
    )
    model.config.max_position_embeddings = 100_000
    assert max_model_len(model, None) == 4096


def test_every_configured_end_of_sequence_counts(model: Any) -> None:
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model, 7, None) == {258, 3, 4, 7}
