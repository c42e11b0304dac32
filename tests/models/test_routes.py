"""Router replay over the families with experts: the engine's experts, and the trainer's logprobs with them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.inference.backend import InvalidRequest
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.inference.embedded.routes import RouteCache
from headrace.inference.experts import chosen_experts, find_routers
from headrace.inference.schema import SamplingParams, read_routes
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import pack
from headrace.rollout.types import ROUTES, Sample, Turn
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.publisher import Publisher
from headrace.trainer.tokens import StepTokens
from headrace.transport.weights import WeightStore
from tests.inference.plain_forward import plain_logprobs, random_prompt, run_all
from tests.models.families import EXPERTS, make_model, write_model
from tests.models.test_families import ROUNDING, SAMPLED, load_plain, marked

ROUNDED = 2.0**-22
"""Relative difference of weights: a few units in the last place."""


def own_routes(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the experts that plain transformers takes: [tokens, layers * experts per token]."""
    routers = find_routers(model)
    found = np.zeros((len(tokens), model.config.num_hidden_layers, routers[0].module.top_k), np.uint8)
    handles = []
    for layer, module in routers:

        def record(_: Any, __: Any, output: Any, layer: int = layer) -> None:
            found[:, layer] = chosen_experts(output).sort(-1).values.numpy()

        handles.append(module.register_forward_hook(record))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found.reshape(len(tokens), -1)


def sampled(engine: Engine, prompts: list[list[int]], tokens: int = 8, **options: Any) -> list[Sample]:
    """Return requests of the engine as samples, in the way of a run."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, routed_experts=True, **options)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    run_all(engine)
    samples = []
    for request in requests:
        result = request.future.result(timeout=0)
        count, prompt = len(result.token_ids), request.tokens[: request.prompt_length]
        routes = None if result.routed_experts is None else read_routes(result.routed_experts)
        samples += merge_turns([Turn(prompt, result.token_ids, result.logprobs, [0] * count, 1.0, routes=routes)])
    for sample in samples:
        sample.set_stream("advantages", sample.mask.astype(np.float32))
    return samples


@pytest.mark.parametrize("family", marked(family for family in EXPERTS if family in SAMPLED))
def test_the_engine_returns_the_experts_of_the_plain_model(family: str, tmp_path: Path) -> None:
    engine = Engine(
        load_model(write_model(tmp_path, family)), max_model_len=80, max_step_tokens=24, routed_experts=True
    )
    text = random_prompt(random.Random(0), 60)
    # In chunks, twice in one step, and after a cached prefix.
    samples = sampled(engine, [text, text[:20], text[:20]]) + sampled(engine, [[*text[:40], 5]])
    plain = load_plain(tmp_path)
    for sample in samples:
        expected = own_routes(plain, sample.token_ids.tolist())
        np.testing.assert_array_equal(sample.streams[ROUTES][:-1], expected[:-1])
        assert (sample.streams[ROUTES][-1] == 255).all()


def write_ties(directory: Path, family: str) -> Path:
    """Write a model whose routers rank all experts alike, so that rounding decides which ones are taken."""
    model = make_model(family)
    with torch.no_grad():
        for _, router in find_routers(model):
            router.weight[:] = router.weight[:1]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith((".router.bias", ".e_score_correction_bias")):
                tensor.zero_()
    model.save_pretrained(directory)
    return directory


def load_rounded(directory: Path) -> Any:
    """Load the model of an engine whose routers' weights differ by rounding."""
    model = load_model(directory)
    with torch.no_grad():
        for _, router in find_routers(model):
            router.weight *= 1 + ROUNDED * torch.randn(router.weight.shape)
    return model


def scores(model: PackedModel, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of the sampled tokens by the trainer, and by the engine."""
    tokens = StepTokens(pack(samples, 256))
    (group,) = tokens.cut(4096)
    batch = tokens.micro_batch(group, model.device)
    found = model.score(batch.row, batch.predictors, batch.labels, batch.temperatures).logprobs
    return found, torch.from_numpy(tokens.logprobs[batch.scored])


@pytest.mark.parametrize("family", marked(family for family in EXPERTS if family in SAMPLED))
def test_with_replayed_experts_the_trainer_agrees_with_an_engine_that_routes_differently(
    family: str, tmp_path: Path
) -> None:
    directory = write_ties(tmp_path, family)
    engine = Engine(load_rounded(directory), max_model_len=80, routed_experts=True)
    rng = random.Random(0)
    samples = sampled(engine, [random_prompt(rng, 20) for _ in range(4)])
    differences = {}
    for mode in ("record", "replay"):
        model = PackedModel(directory, router_replay=mode)  # type: ignore[arg-type]
        found, engines = scores(model, samples)
        differences[mode] = float((found.detach() - engines).abs().max())
        changed = sum(int(each.changed) for each in model.routing.statistics.values())
        assert changed > 0
    assert differences["replay"] < 2 * ROUNDING < 1e-2 < differences["record"]  # as in the tests of dense models
    found.sum().backward()
    for _, router in model.routing.routers:
        assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", marked(family for family in EXPERTS if family not in SAMPLED))
def test_experts_of_another_engine_are_replayed_where_the_embedded_one_refuses_the_family(
    family: str, tmp_path: Path
) -> None:
    directory = write_ties(tmp_path, family)
    other = load_rounded(directory)
    other.set_attn_implementation("eager")  # as for the logprobs: another attention would round to other experts
    samples = []
    for number in range(4):
        tokens = random_prompt(random.Random(number), 24)
        routes, logprobs = own_routes(other, tokens)[:-1], plain_logprobs(other, tokens)[15:]
        samples += merge_turns([Turn(tokens[:16], tokens[16:], logprobs, [0] * 8, 1.0, routes=routes)])
        samples[-1].set_stream("advantages", np.ones(24, np.float32))
    differences = {}
    for mode in ("record", "replay"):
        found, others = scores(PackedModel(directory, router_replay=mode), samples)  # type: ignore[arg-type]
        differences[mode] = float((found.detach() - others).abs().max())
    assert differences["replay"] < 2 * ROUNDING < 1e-2 < differences["record"]


def test_a_request_keeps_the_experts_that_its_tokens_were_sampled_with_when_weights_change(tmp_path: Path) -> None:
    engine = Engine(load_model(write_model(tmp_path / "old", "qwen3_moe")), max_model_len=80, routed_experts=True)
    store, version = WeightStore(tmp_path / "weights"), Version(0, 1)
    Publisher(store, PackedModel(write_model(tmp_path / "new", "qwen3_moe", seed=1))).publish(version)
    prompt = random_prompt(random.Random(0), 20)
    request = engine.submit(prompt, SamplingParams(max_tokens=12, ignore_eos=True, routed_experts=True))
    while len(request.logprobs) < 6:
        engine.step()
    engine.update_weights(store.path(version), version)
    run_all(engine)
    content = request.future.result(timeout=0).routed_experts
    assert content is not None
    routes = read_routes(content)
    old, new = (own_routes(load_plain(tmp_path / name), request.tokens) for name in ("old", "new"))
    np.testing.assert_array_equal(routes[:25], old[:25])  # 20 of the prompt, and 5 of which the next token was sampled
    np.testing.assert_array_equal(routes[25:], new[25:-1])
    assert (old[25:] != new[25:]).any()


def test_an_engine_that_does_not_record_experts_refuses_to_return_them(tmp_path: Path) -> None:
    engine = Engine(load_model(write_model(tmp_path, "qwen3_moe")), max_model_len=80)
    with pytest.raises(InvalidRequest, match="routed_experts"):
        engine.submit([3, 4], SamplingParams(routed_experts=True))


@pytest.mark.parametrize(
    ("slots", "compiled"),
    [(torch.int32, False), (torch.int64, False), pytest.param(torch.int32, True, marks=pytest.mark.full)],
)
def test_experts_are_recorded_by_slots_of_either_type_and_those_of_padding_are_not(
    slots: torch.dtype, compiled: bool
) -> None:
    model = make_model("qwen3_moe")
    cache, tokens = RouteCache(model, find_routers(model), blocks=4), random_prompt(random.Random(0), 20)
    places = torch.tensor([*range(16, 32), *range(48, 51), -1], dtype=slots)  # blocks 1 and 3, and a token of padding
    torch._dynamo.reset()
    for layer in model.model.layers if compiled else ():  # as on a GPU, but for the compiler's own code
        layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=True)
    expected = own_routes(make_model("qwen3_moe"), tokens)
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)  # outside of the engine: nothing is stored
        assert not cache.read([1, 3], 0, 19).any()
        with cache.recording(places):
            model(torch.tensor([tokens]), use_cache=False)
    np.testing.assert_array_equal(cache.read([1, 3], 0, 19), expected[:19])
    cache.copy_blocks([3], [2])
    np.testing.assert_array_equal(cache.read([1, 2], 0, 19), expected[:19])
