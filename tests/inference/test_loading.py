"""Models that the engine supports, and those that it refuses at load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.errors import BadInput
from headrace.inference.backend import resolve_max_model_len
from headrace.inference.embedded import loading
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import (
    eos_token_ids,
    kv_blocks,
    load_model,
    refuse_unsupported,
)
from headrace.inference.embedded.self_check import UnsupportedModel, check_engine
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from tests.inference.plain_forward import assert_like_plain, plain_logprobs, run_all, weights_of
from tests.refusals import refused

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
    refuse_unsupported(model, 64)
    engine = Engine(model, max_model_len=64)
    check_engine(engine)
    assert not engine.has_work
    state = engine.state()
    assert (state.tokens_sampled, state.tokens_computed, state.tokens_cached, state.finished) == (0, 0, 0, {})
    assert model.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_a_loaded_model_computes_what_was_saved_and_takes_updates(
    model_directory: Path,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tokens = list(range(20, 40))
    model = load_model(model_directory, "float32")
    torch.testing.assert_close(plain_logprobs(model, tokens), plain_logprobs(make_model(0), tokens), atol=1e-5, rtol=0)
    Engine(model, max_model_len=64).update_weights(publish(make_model(1), Version(0, 1)), Version(0, 1))
    torch.testing.assert_close(plain_logprobs(model, tokens), plain_logprobs(make_model(1), tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("rope", "plain"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 256),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}, 64),
    ],
)
def test_length_dependent_rope_is_refused_beyond_its_original_length(
    make_model: Callable[[int], Any], rope: dict[str, Any], plain: int
) -> None:
    model = make_model(0)
    model.config.rope_parameters = rope
    refuse_unsupported(model, plain)
    with refused(UnsupportedModel, key="inference.max_model_len", value=plain + 1):
        refuse_unsupported(model, plain + 1)


def test_chunked_attention_is_refused_by_name() -> None:
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=2)
    with refused(UnsupportedModel, key="model", value="Llama4ForCausalLM"):
        refuse_unsupported(AutoModelForCausalLM.from_config(config), 64)


def test_the_context_limit_is_the_models_own_unless_set_lower() -> None:
    assert resolve_max_model_len(256, None) == 256
    assert resolve_max_model_len(256, 64) == 64
    with refused(key="inference.max_model_len", value=512):
        resolve_max_model_len(256, 512)
    assert resolve_max_model_len(100_000, None) == resolve_max_model_len(None, None) == 4096


def test_every_configured_end_of_sequence_counts(model: Any) -> None:
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model, 7, None) == {258, 3, 4, 7}


BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""Of 16 tokens: keys and values in 2 layers with 2 heads of 16 numbers of 4 bytes."""


@pytest.mark.parametrize(
    ("memory", "blocks"),
    [(10**9, 8 * 5), (20 * BLOCK_BYTES + 1, 20), (5 * BLOCK_BYTES + BLOCK_BYTES // 2, 5)],
)
def test_the_cache_has_room_for_all_that_run_within_the_memory(model: Any, memory: int, blocks: int) -> None:
    assert kv_blocks(model, 65, 8, memory) == blocks


def test_a_cache_that_cannot_hold_one_request_is_refused_with_what_to_do(model: Any) -> None:
    with refused(BadInput, key="inference.max_model_len", value=65):
        kv_blocks(model, 65, 8, 5 * BLOCK_BYTES - 1)


def test_a_model_without_shared_heads_takes_what_all_heads_take() -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    model = AutoModelForCausalLM.from_config(transformers.GPTNeoXConfig(**sizes))
    block = 16 * 2 * 2 * 32 * 4
    assert kv_blocks(model, 16, 1000, 10 * block + 5) == 10


def test_layers_with_keys_of_other_sizes_are_counted_one_by_one(model: Any) -> None:
    model.config = transformers.Qwen3Config(**SIZES, per_layer_config={1: {"num_key_value_heads": 4}})
    block = 16 * 2 * (2 + 4) * 16 * 4
    assert kv_blocks(model, 16, 1000, 10 * block + 5) == 10


def test_bfloat16_is_refused_on_a_cpu_without_instructions_for_it(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "has_fast_bfloat16", lambda: False)
    with refused(UnsupportedModel, key="model.dtype", value="bfloat16"):
        load_model(model_directory, "bfloat16")
    monkeypatch.setattr(loading, "has_fast_bfloat16", lambda: True)
    assert load_model(model_directory, "bfloat16").dtype == torch.bfloat16


def test_a_tied_head_that_is_laid_out_for_speed_follows_new_weights(make_model: Callable[[int], Any]) -> None:
    model = make_model(0)
    lay_out_for_small_batches(model)
    engine = Engine(model, max_model_len=64)
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.install(weights_of(make_model(1), Version(0, 1)))
    run_all(engine)
    assert_like_plain(request, {Version(0, 0): make_model(0), Version(0, 1): make_model(1)})
