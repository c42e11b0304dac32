"""Training on a GPU: exact within bfloat16, within its memory, compiled once, and never waiting for the host."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer import lm_head
from headrace.trainer.lm_head import label_logprobs
from headrace.trainer.lora import merged_parameters
from headrace.trainer.loss import ce_loss
from headrace.trainer.memory_plan import MODES, RecomputeMode
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import MetricSums, TrainStep
from headrace.trainer.tokens import COMPONENTS, StepTokens
from headrace.trainer.warmup import warmup_rows
from tests.trainer.losses import default_loss
from tests.trainer.training_samples import Gradients, make_sample, write_random_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
VOCABULARY = 2000
LOSSES = {"rl": default_loss, "ce": ce_loss}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()


SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), Qwen3Config(**SIZES))


@pytest.fixture(scope="module")
def directory_with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every token takes all experts: then rounding cannot send it to another one.
    experts = {"num_experts": 16, "num_experts_per_tok": 16, "moe_intermediate_size": 64}
    return write_random_model(tmp_path_factory.mktemp("experts"), Qwen3MoeConfig(**SIZES, **experts))


def samples_of(lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        prompt = length // 4
        advantages = np.where(np.arange(length) >= prompt, rng.normal(), 0.0)
        sample = make_sample(rng.integers(0, VOCABULARY, length).tolist(), prompt, advantages=advantages.tolist())
        sample.logprobs = np.where(sample.mask, -np.log(VOCABULARY), 0.0).astype(np.float32)
        samples.append(sample)
    return samples


def samples_that_share(lengths: list[int], seed: int = 0) -> list[Sample]:
    """With the first tokens of the first."""
    samples = samples_of(lengths, seed)
    for sample in samples:
        shared = min(len(sample) // 2, len(samples[0]) // 2)
        sample.token_ids[:shared] = samples[0].token_ids[:shared]
    return samples


ROWS = {
    "one sequence": samples_of([1500]),
    "several": samples_of([300, 64, 700, 1, 130, 501]),
    "some that share": samples_that_share([300, 64, 700, 501, 400]),
}


def gradients(directory: Path, samples: list[Sample], **settings: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = PackedModel(directory, longest=2048, **{"lm_head_chunk": 512, **settings})
    optimizer = Gradients(model.named_parameters())
    step = TrainStep(model, optimizer, LOSSES, micro_batch_tokens=None)
    result = step.run(pack(samples, 2048), lr=1.0)
    assert result is not None
    return result.metrics, optimizer.kept


@pytest.mark.parametrize(
    ("mode", "compile"), [*((mode, False) for mode in MODES), ("attention", True), ("selective", True)]
)
@pytest.mark.parametrize("name", ROWS)
def test_a_step_in_bfloat16_has_the_gradients_of_one_in_float32(
    directory: Path, name: str, mode: RecomputeMode, compile: bool
):
    samples = ROWS[name]
    metrics, expected = gradients(directory, samples, dtype=torch.float32, attention="sdpa")
    found, given = gradients(
        directory, samples, dtype=torch.bfloat16, activation_checkpointing=mode, compile=compile, lm_head_chunk=512
    )
    assert found["loss"] == pytest.approx(metrics["loss"], abs=0.02)
    assert found["entropy"] == pytest.approx(metrics["entropy"], abs=0.01)
    assert given.keys() == expected.keys()
    assert {gradient.dtype for gradient in given.values()} == {torch.float32}
    errors = {name: float((given[name] - gradient).norm()) for name, gradient in expected.items()}
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    assert np.hypot.reduce(list(errors.values())) < 0.03 * np.hypot.reduce(list(norms.values()))
    assert not {name: errors[name] / norms[name] for name in norms if errors[name] > 0.15 * norms[name]}


@pytest.mark.parametrize(("mode", "compile"), [(False, False), ("selective", True), ("full", True)])
def test_grouped_experts_in_bfloat16_have_the_gradients_of_a_loop_in_float32(
    directory_with_experts: Path, mode: RecomputeMode, compile: bool, monkeypatch: pytest.MonkeyPatch
):
    samples = ROWS["several"]
    with monkeypatch.context() as patch:
        patch.setattr("headrace.trainer.model.GROUPED_EXPERTS", "eager")
        metrics, expected = gradients(directory_with_experts, samples, dtype=torch.float32, attention="sdpa")
    found, given = gradients(
        directory_with_experts, samples, dtype=torch.bfloat16, activation_checkpointing=mode, compile=compile
    )
    assert found["loss"] == pytest.approx(metrics["loss"], abs=0.02)
    errors = [float((given[name] - gradient).norm()) for name, gradient in expected.items()]
    assert np.hypot.reduce(errors) < 0.03 * np.hypot.reduce([float(each.norm()) for each in expected.values()])


def test_a_matrix_product_is_added_to_float32_without_rounding_it_first():
    generator = torch.Generator(CUDA).manual_seed(0)
    left, right = (torch.randn(64, 300, device=CUDA, generator=generator).bfloat16() for _ in range(2))
    total = torch.randn(64, 64, device=CUDA, generator=generator)
    expected = total.double() + left.double() @ right.double().t()
    lm_head._add_product(total, left, right.t())
    torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("chunk", [100, 1000])
def test_the_head_on_a_gpu_is_that_of_float64(chunk: int, is_frozen: bool):
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(700, 64, device=CUDA, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(5000, 64, device=CUDA, generator=generator) / 4).bfloat16().float()
    weight.requires_grad_(not is_frozen)
    labels = torch.randint(5000, (700,), device=CUDA, generator=generator)
    temperatures = 0.5 + torch.rand(700, device=CUDA, generator=generator)
    direction = torch.randn(700, device=CUDA, generator=generator)
    wide, table = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = (wide @ table.t()).div(temperatures.double()[:, None])
    expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (expected * direction).sum().backward()
    logprobs, entropy = label_logprobs(hidden, weight, labels, temperatures, chunk, in_place=not is_frozen)
    (logprobs * direction).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=0.1, rtol=0)  # logits up to 16 are rounded to 1/16
    assert (logprobs.double() - expected).abs().mean() < 0.02
    assert (entropy.double() - torch.distributions.Categorical(logits=logits).entropy()).abs().mean() < 0.02
    pairs = [(hidden.grad, wide.grad), *([] if is_frozen else [(weight.grad, table.grad)])]
    for given, wanted in pairs:
        assert (given.double() - wanted).norm() / wanted.norm() < 0.02
    assert is_frozen == (weight.grad is None)


def test_every_row_runs_the_program_of_the_warmup(directory: Path):
    model = PackedModel(directory, dtype=torch.bfloat16, compile=True, activation_checkpointing="attention", longest=64)
    step = TrainStep(model, Optimizer(model.named_parameters()), LOSSES)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for samples in warmup_rows(VOCABULARY, 1024, tokens=4096):
        step.warm_up(pack(samples, 1024))
    programs = counters["unique_graphs"]
    rng = np.random.default_rng(0)
    for seed in range(4):
        lengths = rng.integers(20, 900, rng.integers(3, 12)).tolist()
        for samples in (samples_of(lengths, seed), samples_of(lengths[:1], seed), samples_that_share(lengths, seed)):
            step.run(pack(samples, 1024), lr=1e-4)
    assert counters["unique_graphs"] == programs


@pytest.mark.parametrize("kind", ["directory", "directory_with_experts"])
def test_no_micro_batch_waits_for_the_gpu(kind: str, request: pytest.FixtureRequest):
    """What is queued behind a running step must not wait for it: only the end of a step does."""
    model = PackedModel(request.getfixturevalue(kind), dtype=torch.bfloat16, longest=2048)
    step = TrainStep(model, Optimizer(model.named_parameters()), LOSSES)
    for samples in ROWS.values():
        step.run(pack(samples, 2048), lr=1e-4)
        tokens = StepTokens(pack(samples, 2048))
        counts = {component: tokens.count(component) for component in COMPONENTS}
        (group,) = tokens.cut(4096)
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = tokens.micro_batch(group, CUDA, model.kernel)
            step._loss(tokens, batch, counts, {}, MetricSums(), None).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["attention", "auto"])
def test_a_step_takes_no_more_memory_than_its_plan_says(tmp_path: Path, mode: RecomputeMode | str):
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    write_random_model(tmp_path, config)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    limit = 6 << 30
    model = PackedModel(
        tmp_path,
        dtype=torch.bfloat16,
        activation_checkpointing=mode,
        compile=True,
        memory=limit,
        longest=8192,
        lm_head_chunk=2048,
    )
    step = TrainStep(model, Optimizer(model.named_parameters()), LOSSES, micro_batch_tokens=None)
    tokens = model.plan.row_tokens
    for seed in range(2):
        step.run(pack(samples_of([8192] * (2 * tokens // 8192), seed), 8192), lr=1e-4)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= model.plan.bytes
    assert peak >= 0.5 * model.plan.bytes
    if mode == "auto":
        assert model.plan.bytes <= limit


def test_the_frozen_base_of_an_adapter_is_narrow_and_its_adapter_is_not(directory: Path, tmp_path: Path):
    lora = {"r": 4, "alpha": 8}
    model = PackedModel(directory, dtype=torch.bfloat16, lora=lora, longest=2048)
    kinds = {name: parameter.dtype for name, parameter in model.module.named_parameters()}
    assert {kind for name, kind in kinds.items() if ".lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if ".lora_" not in name} == {torch.bfloat16}
    step = TrainStep(model, Optimizer(model.named_parameters()), LOSSES)
    for seed in range(3):
        step.run(pack(samples_of([700, 300], seed), 2048), lr=1e-2)
    model.save(tmp_path / "merged", torch.float32)
    exact = PackedModel(directory, dtype=torch.float32, lora=lora, attention="sdpa", longest=2048)
    for name, tensor in model.trained_tensors().items():
        exact.module.get_parameter(name).data.copy_(tensor)
    wanted = merged_parameters(exact.tensors(), scaling=2.0)
    merged = PackedModel(tmp_path / "merged", dtype=torch.float32, attention="sdpa")
    for name, tensor in merged.tensors().items():
        error = float((tensor - wanted[name]).norm() / wanted[name].norm())
        assert error < 3e-3, f"{name}: {error}"  # the base's own rounding, and no more
    places = torch.arange(699, device=CUDA)
    tokens = samples_of([700])[0].token_ids
    labels = torch.from_numpy(tokens[1:].astype(np.int64)).to(CUDA)
    given, expected = (
        each.logprobs(each.pack_row([tokens[:-1]]), places, labels, torch.ones(699, device=CUDA))
        for each in (model, exact)
    )
    assert (given - expected).abs().mean() < 0.02
