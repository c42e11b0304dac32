"""Published adapters in a running engine: each is the pristine base plus its own difference, whatever came before."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.config.inference import InferenceConfig
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.inference.weights.published import BaseWeights, MergedTensors, PublishedWeights, find_mismatch
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.lora import adapter_layers, add_lora
from headrace.transport.adapter import Adapter, Matrices, write_adapter
from headrace.transport.weights import WeightStore, checksum
from tests.inference.plain_forward import assert_like_plain, run_all

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)
LAYER = "model.layers.0.self_attn.q_proj"
MakeModel = Callable[[int], Any]
Publish = Callable[[Any, Version], Path]


@pytest.fixture
def base(make_model: MakeModel, tmp_path: Path) -> Path:
    make_model(0).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(make_model: MakeModel, seed: int, **settings: Any) -> tuple[Any, Adapter]:
    """The base with an adapter as the trainer has it, and the adapter alone."""
    model = make_model(0)
    config = add_lora(model, **{"r": 3, "alpha": 4, "seed": seed, **settings})
    layers = adapter_layers(dict(model.named_parameters()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrices in layers.values():
            matrices.b.normal_(std=0.3, generator=generator)
    return model, Adapter(config, layers)


@pytest.fixture
def publish_adapter(tmp_path: Path) -> Callable[[Adapter, Version], Path]:
    store = WeightStore(tmp_path / "adapters")

    def publish(adapter: Adapter, version: Version) -> Path:
        store.publish(version, lambda directory: write_adapter(directory, adapter))
        return store.path(version)

    return publish


PublishAdapter = Callable[[Adapter, Version], Path]


def tensors_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def assert_same_tensors(engine: Engine, other: Engine) -> None:
    found, expected = tensors_of(engine), tensors_of(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_the_engine_samples_from_what_the_trainer_computes(
    make_model: MakeModel, base: Path, publish_adapter: PublishAdapter
) -> None:
    trained, adapter = adapted(make_model, 1)
    engine = Engine(make_model(0), max_model_len=64, base=base)
    params = SamplingParams(max_tokens=10, ignore_eos=True, prompt_logprobs=0)
    requests = [engine.submit([7, 30, 8 + length], params) for length in range(3)]
    engine.step()
    directory = publish_adapter(adapter, V1)
    assert engine.update_weights(directory, V1) == checksum(directory)
    run_all(engine)
    for request in requests:
        assert request.future.result().version_spans[-1] == (V1, 1, 10)
        assert_like_plain(request, {Version(0, 0): make_model(0), V1: trained})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_after_others_is_bit_for_bit_that_adapter_alone(
    make_model: MakeModel, base: Path, publish: Publish, publish_adapter: PublishAdapter, dtype: torch.dtype
) -> None:
    _, first = adapted(make_model, 1)
    _, second = adapted(make_model, 2, target_modules=["q_proj", "up_proj"])
    alone, later = (Engine(make_model(0).to(dtype), max_model_len=64, base=base) for _ in range(2))
    later.update_weights(publish_adapter(first, V1), V1)
    later.update_weights(publish(make_model(5), V2), V2)
    directory = publish_adapter(second, V3)
    for engine in (alone, later):
        engine.update_weights(directory, V3)
    assert_same_tensors(later, alone)


def test_an_adapter_is_added_to_the_files_in_float32_and_rounded_once(
    make_model: MakeModel, base: Path, publish_adapter: PublishAdapter
) -> None:
    _, adapter = adapted(make_model, 1)
    model = make_model(0).to(torch.bfloat16)
    lay_out_for_small_batches(model)
    engine = Engine(model, max_model_len=64, base=base)
    engine.update_weights(publish_adapter(adapter, V1), V1)
    stored = load_file(base / "model.safetensors")
    a, b = adapter.layers[LAYER]
    expected = (stored[f"{LAYER}.weight"] + 4 / 3 * (b @ a)).bfloat16()
    twice = (stored[f"{LAYER}.weight"].bfloat16() + (4 / 3 * (b @ a)).bfloat16()).bfloat16()
    found = engine.model.get_submodule(LAYER).weight
    assert torch.equal(found, expected)
    assert not torch.equal(found, twice)
    assert torch.equal(engine.model.model.norm.weight, stored["model.norm.weight"].bfloat16())


def test_tensors_that_are_merged_one_by_one_are_those_that_are_merged_at_once(
    make_model: MakeModel, base: Path
) -> None:
    _, adapter = adapted(make_model, 1)
    weights, parameters = BaseWeights(base, torch.device("cpu")), make_model(0).state_dict()
    expected = weights.merge(adapter, parameters, base)
    lazy = MergedTensors(weights, adapter, parameters, base)
    assert isinstance(expected, dict)
    assert lazy.keys() == expected.keys()
    assert find_mismatch(parameters, lazy, optional=set(parameters) - set(lazy)) is None
    # `copy` may queue copies in several streams, while the next tensor takes the memory of the one before.
    PublishedWeights(V1, "", lazy).install(parameters, copy=pytest.fail)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


def test_files_that_end_while_tensors_are_merged_one_by_one_are_no_refusal(
    make_model: MakeModel, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapter = adapted(make_model, 1)
    parameters = make_model(0).state_dict()
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    lazy = MergedTensors(BaseWeights(base, torch.device("cpu")), adapter, parameters, base)
    first, *_ = [name for name in lazy if name in lazy._matrices]
    lazy.shapes = {first: lazy.shapes.pop(first), **lazy.shapes}  # merged first, and so changed
    monkeypatch.setattr(lazy, "merged_on", partial(merge_only, lazy.merged_on, first))
    with pytest.raises(OSError, match="gone"):  # a `WeightsError` would mean that nothing has changed
        PublishedWeights(V1, "", lazy).install(parameters)
    assert not torch.equal(parameters[first], before[first])


def merge_only(merge: Callable[..., torch.Tensor], first: str, name: str, device: torch.device) -> torch.Tensor:
    if name != first:
        raise WeightsError("the file is gone")
    return merge(name, device)


def test_a_whole_model_after_an_adapter_is_that_model(
    make_model: MakeModel, base: Path, publish: Publish, publish_adapter: PublishAdapter
) -> None:
    _, adapter = adapted(make_model, 1)
    engine = Engine(make_model(0), max_model_len=64, base=base)
    engine.update_weights(publish_adapter(adapter, V1), V1)
    engine.update_weights(publish(make_model(5), V2), V2)
    assert_same_tensors(engine, Engine(make_model(5), max_model_len=64))


def test_an_adapter_that_says_nothing_gives_the_base_bit_for_bit(
    make_model: MakeModel, base: Path, publish_adapter: PublishAdapter
) -> None:
    model = make_model(0)
    config = add_lora(model, r=3, alpha=4)
    engine = Engine(make_model(9), max_model_len=64, base=base)
    engine.update_weights(publish_adapter(Adapter(config, adapter_layers(dict(model.named_parameters()))), V1), V1)
    assert_same_tensors(engine, Engine(make_model(0), max_model_len=64))


def test_a_base_in_several_files_with_unrelated_ones_is_read_by_its_index(
    make_model: MakeModel, base: Path, tmp_path: Path, publish_adapter: PublishAdapter
) -> None:
    _, adapter = adapted(make_model, 1)
    split = tmp_path / "split"
    make_model(0).save_pretrained(split, max_shard_size="30KB")
    assert len(json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]) > 3
    make_model(5).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(split / "consolidated.safetensors")
    directory = publish_adapter(adapter, V1)
    engines = [Engine(make_model(0), max_model_len=64, base=place) for place in (base, split)]
    for engine in engines:
        engine.update_weights(directory, V1)
    assert_same_tensors(*engines)


def test_an_engine_thread_takes_an_adapter(make_model: MakeModel, base: Path, publish_adapter: PublishAdapter) -> None:
    trained, adapter = adapted(make_model, 1)
    thread = EngineThread(Engine(make_model(0), max_model_len=64, base=base))
    directory = publish_adapter(adapter, V1)
    assert thread.update_weights(directory, V1) == checksum(directory)
    request = thread.submit([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    request.future.result(timeout=60)
    thread.stop()
    assert_like_plain(request, trained)


def test_a_server_merges_with_the_model_it_was_started_with(
    make_model: MakeModel, model_directory: Path, publish_adapter: PublishAdapter
) -> None:
    trained, adapter = adapted(make_model, 1)
    config = InferenceConfig(model={"name": str(model_directory), "dtype": "float32"}, max_model_len=64)
    engine = load_engine(config, model_directory, Tokenizer(model_directory))
    engine.update_weights(publish_adapter(adapter, V1), V1)
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    run_all(engine)
    assert_like_plain(request, trained)


def wider(adapter: Adapter) -> Adapter:
    return Adapter(adapter.config, {**adapter.layers, LAYER: Matrices(torch.ones(3, 40), adapter.layers[LAYER].b)})


def with_unknown_layer(adapter: Adapter) -> Adapter:
    return Adapter(
        adapter.config, {**adapter.layers, "model.layers.7.mlp.up_proj": Matrices(torch.ones(3, 32), torch.ones(64, 3))}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, rf"{LAYER}\.weight.*\[64, 40\].*\[64, 32\]"),
        (with_unknown_layer, r"model\.layers\.7\.mlp\.up_proj\.weight"),
    ],
)
def test_an_adapter_that_does_not_fit_the_base_is_refused_before_anything_changes(
    make_model: MakeModel,
    base: Path,
    publish_adapter: PublishAdapter,
    change: Callable[[Adapter], Adapter],
    message: str,
) -> None:
    _, adapter = adapted(make_model, 1)
    engine = Engine(make_model(0), max_model_len=64, base=base)
    with pytest.raises(WeightsError, match=message):
        engine.update_weights(publish_adapter(change(adapter), V1), V1)
    assert engine.version == Version(0, 0)
    assert_same_tensors(engine, Engine(make_model(0), max_model_len=64))


def test_an_adapter_without_a_base_to_merge_it_with_is_refused(
    make_model: MakeModel, tmp_path: Path, publish_adapter: PublishAdapter
) -> None:
    _, adapter = adapted(make_model, 1)
    directory = publish_adapter(adapter, V1)
    with pytest.raises(WeightsError, match="adapter"):
        Engine(make_model(0), max_model_len=64).update_weights(directory, V1)
    with pytest.raises(WeightsError, match="safetensors"):
        Engine(make_model(0), max_model_len=64, base=tmp_path).update_weights(directory, V1)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_damaged_is_refused(
    make_model: MakeModel, base: Path, publish_adapter: PublishAdapter, file: str
) -> None:
    _, adapter = adapted(make_model, 1)
    directory = publish_adapter(adapter, V1)
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content + b" ")
    with pytest.raises(WeightsError, match="damaged"):
        Engine(make_model(0), max_model_len=64, base=base).update_weights(directory, V1)
