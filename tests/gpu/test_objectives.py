"""Latents and the reference of a KL penalty on a GPU: the numbers of the CPU, and of the engine that sampled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.config.trainer import TrainerConfig
from headrace.inference.embedded.engine import Engine
from headrace.inference.latents import add_gates
from headrace.inference.schema import LatentParams
from headrace.rollout.packing import pack
from headrace.trainer.model import PackedModel
from headrace.trainer.ranks import Ranks
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.rl import make_losses
from headrace.trainer.step import TrainStep
from tests.trainer.test_latents import HYBRID, SOFT, sampled, trainer_logprobs
from tests.trainer.test_reference import penalized
from tests.trainer.training_samples import Gradients, random_samples, write_random_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LORA = {"r": 4, "alpha": 8}
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    initializer_range=0.15,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.mark.parametrize("latents", [HYBRID, SOFT], ids=["hybrid", "soft"])
def test_the_trainer_on_a_gpu_gives_the_logprobs_of_the_engine_on_it(directory: Path, latents: LatentParams) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory).cuda().eval()
    if latents.kind == "hybrid":
        add_gates(model, directory)
    engine = Engine(model, max_model_len=64, decode=lambda ids: "".join(map(chr, ids)))
    samples = sampled(engine, latents, [[5, 6, 7], [5, 6, 7], [9] * 20, [5, 6, 7, 8]])
    ours, theirs = trainer_logprobs(PackedModel(directory, latents=latents), samples)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3 if latents.kind == "soft" else 0, atol=5e-4)


def penalized_step(directory: Path, device: str, **settings: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """One step of a model that has moved away from its start, which is its reference."""
    model = PackedModel(directory, Ranks(torch.device(device)), longest=32, **settings)
    optimizer, weights = Gradients(model.named_parameters()), ReferenceWeights(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters().items()}
    step = TrainStep(model, optimizer, make_losses(TrainerConfig()), None, weights)
    result = step.run(pack(penalized(random_samples(seed=3, count=9), 0.5), 32), lr=1.0)
    assert result is not None
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters().items())
    return result.metrics, {name: gradient.float().cpu() for name, gradient in optimizer.kept.items()}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_the_penalty_on_a_gpu_and_its_gradient_are_those_of_the_cpu(directory: Path, compile: bool, lora: Any) -> None:
    expected, gradients = penalized_step(directory, "cpu", lora=lora)
    metrics, found = penalized_step(directory, "cuda", compile=compile, lora=lora, attention="sdpa")
    assert expected["kl/k3"] > 1e-3
    assert metrics["kl/k3"] == pytest.approx(expected["kl/k3"], rel=1e-2)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))
