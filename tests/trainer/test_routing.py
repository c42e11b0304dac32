"""Router replay in the trainer: with recomputed layers, adapters, compiled layers, shared prefixes; and its metrics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace.runfile  # noqa: F401 (registers the losses)
from headrace.config.trainer import TrainerConfig
from headrace.rollout.packing import pack
from headrace.rollout.types import ROUTES, Sample
from headrace.trainer.layers import compile_layers
from headrace.trainer.model import PackedModel
from headrace.trainer.ranks import Ranks
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.rl import make_losses
from headrace.trainer.routing import RoutingMetrics
from headrace.trainer.step import TrainStep
from headrace.trainer.tokens import StepTokens
from tests.models.families import write_model
from tests.rollout.strategies import sample
from tests.trainer.training_samples import Gradients

LAYERS, TOP_K, NUM_EXPERTS, FREE = 2, 2, 4, 255


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def routed_samples(seed: int = 0, prompts: int = 2) -> list[Sample]:
    """Samples of a shared prompt, of which as many as `prompts` have routes of their own; the rest routes freely."""
    rng = np.random.default_rng(seed)
    prompt, samples = rng.integers(3, 97, 6), []
    for number in range(3):
        whole = sample(6, 4, advantages=[0.0] * 6 + [1.0] * 4)
        whole.token_ids[:] = np.concatenate([prompt, rng.integers(3, 97, 4)])
        pairs = np.stack([np.sort(rng.permutation(NUM_EXPERTS)[:TOP_K]) for _ in range(10 * LAYERS)])
        routes = pairs.reshape(10, -1).astype(np.uint8)
        if number < prompts:
            routes[:6] = [0, 1 + number] * LAYERS
        else:
            routes[:6] = [0, 1] * LAYERS
        routes[-1] = FREE
        whole.streams[ROUTES] = routes
        samples.append(whole)
    return samples


def run(model: PackedModel, samples: list[Sample]) -> tuple[torch.Tensor, int]:
    """Return the logprobs of the scored tokens, and the tokens of the row."""
    tokens = StepTokens(pack(samples, 64))
    (group,) = tokens.cut(4096)
    batch = tokens.micro_batch(sorted(group), model.device)
    scores = model.score(batch.row, batch.predictors, batch.labels, batch.temperatures)
    return scores.logprobs, batch.row.token_ids.shape[1]


def gradients(model: PackedModel, samples: list[Sample]) -> dict[str, torch.Tensor]:
    logprobs, _ = run(model, samples)
    (logprobs @ torch.linspace(-1, 1, len(logprobs))).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters().items()}


@pytest.mark.parametrize("options", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "attention"}])
def test_recomputed_layers_take_the_recorded_experts_again(directory: Path, options: dict[str, Any]):
    expected = gradients(PackedModel(directory, router_replay="replay"), routed_samples())
    free = gradients(PackedModel(directory), routed_samples())
    found = gradients(PackedModel(directory, router_replay="replay", **options), routed_samples())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    assert any((free[name] - gradient).abs().max() > 1e-2 for name, gradient in expected.items())


def test_a_reference_scores_with_the_recorded_experts(directory: Path):
    samples = routed_samples()
    for each in samples:
        each.set_stream("k3_weights", each.mask.astype(np.float32))
    model = PackedModel(directory, router_replay="replay")
    reference = ReferenceWeights(model)
    for tensor in reference.tensors.values():
        tensor.mul_(1.1)
    step = TrainStep(model, Gradients(model.named_parameters()), make_losses(TrainerConfig()), 64, reference)
    result = step.run(pack(samples, 64), lr=1.0)
    assert result is not None

    def expected(mode: Any) -> float:
        policy, other = (PackedModel(directory, router_replay=mode) for _ in range(2))
        with torch.no_grad():
            for parameter in other.named_parameters().values():
                parameter.mul_(1.1)
        gaps = (run(other, samples)[0] - run(policy, samples)[0]).detach()
        return float((gaps.exp() - gaps - 1).mean())

    assert result.metrics["kl/k3"] == pytest.approx(expected("replay"), rel=1e-4)
    assert expected("record") != pytest.approx(expected("replay"), rel=1e-2)


@pytest.mark.full
def test_compiled_layers_share_one_program_that_replays(directory: Path):
    expected, _ = run(PackedModel(directory, router_replay="replay"), routed_samples())
    model = PackedModel(directory, router_replay="replay", activation_checkpointing="full")
    _ = model.plan
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(model._layers, backend="aot_eager")
    found, _ = run(model, routed_samples())
    found.sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not [why for why in torch._dynamo.utils.counters["graph_break"] if "HOP" in why]
    assert len(model.routing.statistics) == LAYERS


def test_an_adapter_is_trained_with_the_recorded_experts(directory: Path):
    replayed, _ = run(PackedModel(directory, router_replay="replay"), routed_samples())
    adapted, _ = run(PackedModel(directory, router_replay="replay", lora={"r": 2, "alpha": 4}), routed_samples())
    torch.testing.assert_close(adapted, replayed)  # an untrained adapter changes nothing


def test_rows_share_a_prompt_only_as_far_as_its_routes_agree(directory: Path):
    model = PackedModel(directory, router_replay="replay")
    together, tokens = run(model, routed_samples(prompts=2))
    assert tokens == 6 + 6 + 3 * 3  # two routes of the prompt; the last token of each sample is no input
    alone = torch.cat([run(model, [each])[0] for each in routed_samples(prompts=2)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert run(model, routed_samples(prompts=1))[1] == 6 + 3 * 3


def test_recorded_experts_are_only_compared_in_record_mode(directory: Path):
    free, _ = run(PackedModel(directory), routed_samples())
    model = PackedModel(directory, router_replay="record")
    torch.testing.assert_close(run(model, routed_samples())[0], free, atol=1e-5, rtol=0)
    layers = model.routing.statistics.values()
    assert all(int(each.recorded) == 21 and 0 < int(each.changed) <= 21 for each in layers)


def test_tokens_without_a_route_are_routed_freely(directory: Path):
    samples = routed_samples()
    for each in samples:
        each.streams[ROUTES][:] = FREE
    model = PackedModel(directory, router_replay="replay")
    torch.testing.assert_close(run(model, samples)[0], run(PackedModel(directory), samples)[0], atol=1e-5, rtol=0)
    assert all(int(each.recorded) == 0 for each in model.routing.statistics.values())


def test_metrics_of_routers_by_layer(directory: Path):
    samples = routed_samples()
    for each in samples:
        each.streams[ROUTES][:-1] = [0, 1, 2, 3]  # the first layer takes 0 and 1, the second 2 and 3
    model, metrics = PackedModel(directory, router_replay="replay"), RoutingMetrics()
    for _ in range(2):
        run(model, samples)
        metrics.add(model.routing.statistics)
    values = metrics.by_layer(Ranks())
    assert values["load"] == {0: 2.0, 1: 2.0}  # of four experts two have all tokens
    assert all(0 < value < 1 for value in values["entropy"].values())
    assert all(0 < value <= 1 for value in values["changed"].values())
    with torch.no_grad():
        for _, router in model.routing.routers:
            router.weight.zero_()
    uniform = RoutingMetrics()
    run(model, samples)
    uniform.add(model.routing.statistics)
    assert uniform.by_layer(Ranks())["entropy"] == pytest.approx({0: 1.0, 1: 1.0})
    assert RoutingMetrics().by_layer(Ranks()) == {}
