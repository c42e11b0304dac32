"""Adapters that are served beside the model, by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from headrace.inference.backend import ModelNotFound
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.reading import WeightsError
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices, merged, write_adapter
from tests.inference.plain_forward import assert_like_plain, plain_logprobs, run_all

PROMPT = [7, 21, 3, 99, 140, 5, 66, 12, 250, 31, 8, 77, 45, 101, 9, 13, 200, 17, 4, 88]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
CONFIG = AdapterConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"])

ModelMaker = Callable[[int], Qwen3ForCausalLM]


def matrices(model: Qwen3ForCausalLM, seed: int) -> dict[str, Matrices]:
    torch.manual_seed(seed)
    return {
        name: Matrices(0.3 * torch.randn(4, layer.in_features), 0.3 * torch.randn(layer.out_features, 4))
        for name, layer in model.named_modules()
        if name.endswith(("q_proj", "down_proj"))
    }


def adapted(model: Qwen3ForCausalLM, layers: dict[str, Matrices]) -> Qwen3ForCausalLM:
    for name, layer in model.named_modules():
        if name in layers:
            layer.weight.data = merged(layer.weight.data, layers[name], CONFIG.scaling)
    return model


@pytest.fixture
def layers(make_model: ModelMaker) -> dict[str, Matrices]:
    return matrices(make_model(0), seed=3)


@pytest.fixture
def directory(tmp_path: Path, layers: dict[str, Matrices]) -> Path:
    write_adapter(tmp_path / "adapter", Adapter(CONFIG, layers))
    return tmp_path / "adapter"


def test_requests_with_and_without_an_adapter_share_steps_and_each_has_its_own_model(
    make_model: ModelMaker, layers: dict[str, Matrices], directory: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    engine.adapters.add(engine.adapters.read("wheel", directory))
    requests = [engine.submit(PROMPT, SAMPLING, adapter=[None, "wheel"][number % 2]) for number in range(6)]
    run_all(engine)
    plain, changed = make_model(0), adapted(make_model(0), layers)
    for request in requests[::2]:
        assert_like_plain(request, plain)
    for request in requests[1::2]:
        assert_like_plain(request, changed)
    assert (plain_logprobs(plain, requests[1].tokens) - plain_logprobs(changed, requests[1].tokens)).abs().max() > 0.1


def test_another_adapter_under_the_same_name_finds_nothing_in_the_prefix_cache(
    make_model: ModelMaker, tmp_path: Path, directory: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    engine.adapters.add(engine.adapters.read("wheel", directory))
    engine.submit(PROMPT, SAMPLING, adapter="wheel")
    run_all(engine)
    others = matrices(make_model(0), seed=4)
    write_adapter(tmp_path / "other", Adapter(CONFIG, others))
    engine.adapters.add(engine.adapters.read("wheel", tmp_path / "other"))
    request = engine.submit(PROMPT, SAMPLING, adapter="wheel")
    run_all(engine)
    assert request.future.result().cached_tokens == 0
    assert_like_plain(request, adapted(make_model(0), others))


def test_a_request_in_flight_keeps_the_adapter_that_is_unloaded(
    make_model: ModelMaker, layers: dict[str, Matrices], directory: Path
) -> None:
    thread = EngineThread(Engine(make_model(0), max_model_len=64))
    try:
        thread.load_adapter("wheel", directory)
        thread.pause()
        request = thread.submit(PROMPT, SAMPLING, adapter="wheel")
        thread.unload_adapter("wheel")
        with pytest.raises(ModelNotFound, match="wheel"):
            thread.submit(PROMPT, SAMPLING, adapter="wheel")
        thread.resume()
        request.future.result(timeout=30)
        assert_like_plain(request, adapted(make_model(0), layers))
        assert thread.state().adapters == []
    finally:
        thread.stop()


def test_an_adapter_of_another_model_is_refused_by_the_layer_that_does_not_fit(
    make_model: ModelMaker, tmp_path: Path
) -> None:
    engine = Engine(make_model(0), max_model_len=64)
    unknown = {"model.layers.9.mlp.gate": Matrices(torch.zeros(4, 32), torch.zeros(32, 4))}
    write_adapter(tmp_path / "unknown", Adapter(CONFIG, unknown))
    with pytest.raises(WeightsError, match=r"layers\.9\.mlp\.gate"):
        engine.adapters.read("x", tmp_path / "unknown")
    narrow = {"model.layers.0.self_attn.q_proj": Matrices(torch.zeros(4, 16), torch.zeros(64, 4))}
    write_adapter(tmp_path / "narrow", Adapter(CONFIG, narrow))
    with pytest.raises(WeightsError, match=r"\[64, 16\].*\[64, 32\]"):
        engine.adapters.read("x", tmp_path / "narrow")


def test_a_seeded_request_with_an_adapter_has_the_same_bits_in_any_batch(
    make_model: ModelMaker, directory: Path
) -> None:
    def logprobs(others: int) -> list[float]:
        model = make_model(0)
        lay_out_for_small_batches(model)  # as stored, some CPUs multiply two rows in another order than many
        engine = Engine(model, max_model_len=64)
        engine.adapters.add(engine.adapters.read("wheel", directory))
        seeded = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)
        request = engine.submit(PROMPT, seeded, adapter="wheel")
        for number in range(others):
            engine.submit([5 + number] * 7, SAMPLING, adapter=[None, "wheel"][number // 2 % 2])
        run_all(engine)
        return request.future.result().logprobs

    assert logprobs(0) == logprobs(1) == logprobs(3)
