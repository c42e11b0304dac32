"""The penalty for the distance to a reference policy: which weights score, and that a resumed run is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.config.trainer import ReferenceConfig, TrainerConfig
from headrace.errors import BadInput
from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.learner import Learner
from headrace.trainer.model import PackedModel
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.rl import make_losses
from headrace.trainer.step import TrainStep
from tests.refusals import refused
from tests.trainer.training_samples import ARCHITECTURES, Gradients, random_samples, write_random_model

MakeLearner = Callable[..., Learner]
LORA = {"r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), ARCHITECTURES["qwen3"])


@pytest.fixture
def make_learner(directory: Path, tmp_path: Path) -> MakeLearner:
    """A learner that starts from the newest checkpoint of its own directory, if there is one."""

    def make(name: str = "run", every: int | None = None, **settings: Any) -> Learner:
        config = TrainerConfig(
            model={"name": str(directory)}, output_dir=tmp_path / name, max_steps=40, seq_len=32,
            optim={"lr": 1e-2}, reference=ReferenceConfig(every=every), **settings,
        )  # fmt: skip
        return Learner(config, make_losses(config), tmp_path / name, "latest", reference=config.reference)

    return make


def penalized(samples: list[Sample], coef: float, estimator: str = "k3", **streams: float) -> list[Sample]:
    for sample in samples:
        for name, value in {f"{estimator}_weights": coef, **streams}.items():
            sample.set_stream(name, np.full(len(sample), value))
    return samples


def step_of(directory: Path, samples: list[Sample], reference: bool = True) -> tuple[dict[str, float], Gradients]:
    """One step of a model whose reference is 10% larger in every parameter."""
    model = PackedModel(directory)
    optimizer, weights = Gradients(model.named_parameters()), ReferenceWeights(model)
    for tensor in weights.tensors.values():
        tensor.mul_(1.1)
    config = TrainerConfig()
    step = TrainStep(model, optimizer, make_losses(config), 64, weights if reference else None)
    result = step.run(pack(samples, 32), lr=1.0)
    assert result is not None
    return result.metrics, optimizer


def plain_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = model(ids[None]).logits[0, :-1] / sample.temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[sample.mask[1:], 0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_penalty_and_gradient_are_those_of_the_formula_over_the_rl_tokens(directory: Path, estimator: str):
    samples = random_samples(seed=3, count=9)
    members = sum(int(sample.mask.sum()) for sample in samples)
    penalized(samples[:4], 0.5, estimator)  # the others count in the denominator
    without, plain = step_of(directory, random_samples(seed=3, count=9))
    metrics, optimizer = step_of(directory, samples)
    model, reference = (AutoModelForCausalLM.from_pretrained(directory) for _ in range(2))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
        references = [plain_logprobs(reference, sample) for sample in samples[:4]]
    gaps = torch.cat([r - plain_logprobs(model, sample) for r, sample in zip(references, samples, strict=False)])
    estimates = gaps**2 / 2 if estimator == "k2" else gaps.exp() - gaps - 1
    (0.5 * estimates.sum() / members).backward()
    assert metrics[f"kl/{estimator}"] == pytest.approx(estimates.mean().item(), rel=1e-4)
    assert metrics["loss"] - without["loss"] == pytest.approx(0.5 * estimates.sum().item() / members, rel=1e-3)
    for name, parameter in model.named_parameters():
        added = optimizer.kept[name] - plain.kept[name]
        torch.testing.assert_close(added, parameter.grad, atol=1e-5 * float(parameter.grad.abs().max()), rtol=1e-3)


def test_a_weight_of_0_changes_no_bit_and_needs_no_reference(directory: Path):
    samples = random_samples(seed=1, count=6)
    metrics, optimizer = step_of(directory, penalized(random_samples(seed=1, count=6), 0.0), reference=False)
    without, plain = step_of(directory, samples)
    assert metrics == without
    assert all(torch.equal(optimizer.kept[name], gradient) for name, gradient in plain.kept.items())


def test_logprobs_that_come_with_a_sample_are_used_as_they_are(directory: Path):
    own = penalized(random_samples(seed=2, count=2), 1.0, kl_logprobs=-2.0)
    metrics, _ = step_of(directory, [*own, *random_samples(seed=5, count=2)], reference=False)
    model = AutoModelForCausalLM.from_pretrained(directory)
    gaps = torch.cat([-2.0 - plain_logprobs(model, sample) for sample in own])
    assert metrics["kl/k3"] == pytest.approx((gaps.exp() - gaps - 1).mean().item(), rel=1e-4)


def test_a_penalty_without_any_reference_is_refused_by_the_key_that_keeps_one(directory: Path):
    with refused(BadInput, key="trainer.reference"):
        step_of(directory, penalized(random_samples(seed=2, count=2), 1.0), reference=False)


@pytest.mark.parametrize("lora", [None, LORA])
def test_parameters_are_the_same_bits_after_the_reference_has_scored(directory: Path, lora: dict[str, int] | None):
    model = PackedModel(directory, lora=lora)
    reference = ReferenceWeights(model)
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.add_(torch.randn_like(parameter))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters().items()}
    with reference.swapped_in():
        assert not any(torch.equal(before[name], p) for name, p in model.named_parameters().items())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters().items())


def test_the_reference_of_an_adapter_is_the_base_model(directory: Path):
    base, adapted = PackedModel(directory), PackedModel(directory, lora=LORA)
    reference = ReferenceWeights(adapted)
    with torch.no_grad():
        for parameter in adapted.named_parameters().values():
            parameter.add_(torch.randn_like(parameter))
    row = base.pack_row([np.array([1, 5, 9, 2, 7])])
    scored = row, torch.arange(4), torch.tensor([5, 9, 2, 7]), torch.ones(4)
    assert not torch.equal(adapted.logprobs(*scored), base.logprobs(*scored))
    with reference.swapped_in():
        assert torch.equal(adapted.logprobs(*scored), base.logprobs(*scored))
    assert {name.rpartition(".")[2] for name in reference.tensors} == {"lora_A", "lora_B"}


def distance_after(learner: Learner, coef: float) -> float:
    """Return the k3 of 12 steps of the same samples with large advantages, at the last step."""
    for _ in range(12):
        result = learner.learn(penalized(random_samples(0, 6), coef))
        assert result is not None
    return result.metrics["kl/k3"]


def test_a_large_coefficient_keeps_the_policy_at_its_start(make_learner: MakeLearner):
    assert distance_after(make_learner("free"), 1e-9) > 0.1
    assert distance_after(make_learner("held"), 300.0) < 0.01


@pytest.mark.parametrize(("every", "lora"), [(None, None), (2, None), (2, LORA)])
def test_six_steps_equal_three_saved_loaded_and_three_more(
    make_learner: MakeLearner, every: int | None, lora: dict[str, int] | None
):
    def learn(learner: Learner, first: int, last: int) -> Learner:
        for number in range(first, last + 1):
            assert learner.learn(penalized(random_samples(number, 4), 0.5))
        return learner

    straight = learn(make_learner("straight", every, lora=lora), 1, 6)
    first = learn(make_learner("resumed", every, lora=lora), 1, 3)
    first.begin_checkpoint()
    first.checkpoints.finish(wait=True)
    resumed = learn(make_learner("resumed", every, lora=lora), 4, 6)
    for name, tensor in straight.model.trained_tensors().items():
        assert torch.equal(tensor, resumed.model.trained_tensors()[name]), name
    for name, tensor in straight.reference.tensors.items():
        assert torch.equal(tensor, resumed.reference.tensors[name]), name


def test_the_reference_follows_the_policy_every_n_steps(make_learner: MakeLearner):
    learner, seen = make_learner(every=3), []
    for number in range(1, 8):
        assert learner.learn(penalized(random_samples(number, 4), 0.5))
        own, other = learner.model.named_parameters(), learner.reference.tensors
        seen.append(all(torch.equal(parameter, other[name]) for name, parameter in own.items()))
    assert seen == [False, False, True, False, False, True, False]
