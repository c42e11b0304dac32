"""Training of a policy that thinks in latent space: the engine's logprobs, gates that learn, exact resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.config.trainer import TrainingConfig
from headrace.inference.embedded.engine import Engine
from headrace.inference.latents import GATES, add_gates, read_gates
from headrace.inference.schema import LatentParams, SamplingParams
from headrace.inference.weights.published import read_published
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import pack
from headrace.rollout.types import Sample, Turn
from headrace.rollout.version import Version
from headrace.trainer.learner import Learner, export
from headrace.trainer.model import PackedModel
from headrace.trainer.tokens import StepTokens
from headrace.transport.weights import GATES_FILE, WeightStore
from tests.trainer.losses import reinforce_loss
from tests.trainer.training_samples import ARCHITECTURES, random_samples, write_random_model

HYBRID, SOFT = (LatentParams(kind=kind, until="\x00 never") for kind in ("hybrid", "soft"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("latents") / "model", ARCHITECTURES["qwen3"])


def sampled(engine: Engine, latents: LatentParams, prompts: list[list[int]]) -> list[Sample]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, latents=latents, temperature=0.8)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    turns = []
    for request in requests:
        result = request.future.result(timeout=0)
        rows = np.frombuffer(result.latents, "<f2").reshape(len(result.token_ids), -1)
        turns.append(
            Turn(
                request.tokens[: request.prompt_length], result.token_ids, result.logprobs, [0] * 12, 0.8, latents=rows
            )
        )
    samples = [sample for turn in turns for sample in merge_turns([turn])]
    for sample in samples:
        sample.set_stream("advantages", sample.mask.astype(np.float32))
    return samples


def engine_of(directory: Path, latents: LatentParams) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(directory)
    if latents.kind == "hybrid":
        add_gates(model, directory)
    return Engine(model, max_model_len=64, decode=lambda ids: "".join(map(chr, ids)))


def trainer_logprobs(model: PackedModel, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's and the engine's, of all tokens that are trained."""
    tokens = StepTokens(pack(samples, 64))
    (group,) = tokens.cut(1000)
    batch = tokens.micro_batch(group, model.device)
    scores = model.score(batch.row, batch.predictors, batch.labels, batch.temperatures, batch.latents)
    return scores.logprobs.detach().cpu().numpy(), tokens.logprobs[batch.scored]


@pytest.mark.parametrize("latents", [HYBRID, SOFT], ids=["hybrid", "soft"])
def test_one_forward_of_the_trainer_gives_the_logprobs_of_the_engine(directory: Path, latents: LatentParams) -> None:
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 20, [5, 6, 7, 8]]  # some share a prefix
    samples = sampled(engine_of(directory, latents), latents, prompts)
    model = PackedModel(directory, latents=latents)
    ours, theirs = trainer_logprobs(model, samples)
    # A Gaussian over 32 coordinates sums squares of up to 4 sigma: its logprobs are about 16.
    np.testing.assert_allclose(ours, theirs, rtol=2e-4 if latents.kind == "soft" else 0, atol=1e-4)
    with pytest.raises(ValueError, match="latents"):
        trainer_logprobs(PackedModel(directory), samples)
    for sample in samples:
        del sample.streams["latents"]
    plain, _ = trainer_logprobs(PackedModel(directory), samples)
    assert np.abs(plain - theirs).max() > 1e-3  # the latents matter


def test_the_gradient_of_soft_thoughts_is_that_of_the_gaussian_around_the_expected_embedding(directory: Path) -> None:
    samples = sampled(engine_of(directory, SOFT), SOFT, [[5, 6, 7]])
    model = PackedModel(directory, latents=SOFT)
    tokens = StepTokens(pack(samples, 64))
    batch = tokens.micro_batch(tokens.cut(1000)[0], model.device)
    model.score(batch.row, batch.predictors, batch.labels, batch.temperatures, batch.latents).logprobs.sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters().items()}

    plain = AutoModelForCausalLM.from_pretrained(directory)
    table, sample = plain.get_input_embeddings().weight, samples[0]
    x = torch.from_numpy(sample.streams["latents"].astype(np.float32))
    embeddings = torch.where(x.any(-1, keepdim=True), x, table[sample.token_ids])
    logits = plain(inputs_embeds=embeddings[None]).logits[0, 2:-1]
    mean = torch.softmax(logits / 0.5, -1) @ table
    sigma = 0.33 * table.detach().pow(2).mean().sqrt()
    (-((x[3:] - mean) ** 2).sum() / (2 * sigma**2)).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-3 * float(parameter.grad.abs().max()))


def learner_of(directory: Path, run: Path, resume: str | None = None, **more: Any) -> Learner:
    config = TrainingConfig(
        model={"name": str(directory), "latents": {"gates_lr": 2e-4, "retention_lr": 3e-3}},
        output_dir=run,
        max_steps=10,
        seq_len=64,
        optim={"lr": 1e-5},
        **more,
    )
    return Learner(config, {"rl": reinforce_loss}, run, resume)


def latent_samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = random_samples(seed, 6)
    for sample in samples[:5]:  # the last one has none
        rows = rng.normal(size=(len(sample), 32))
        sample.set_stream("latents", rows * sample.mask[:, None] * (np.arange(len(sample)) < len(sample) - 2)[:, None])
    return samples


def test_gates_learn_at_their_own_rates_and_their_values_are_reported(directory: Path, tmp_path: Path) -> None:
    learner = learner_of(directory, tmp_path)
    before = {name: tensor.clone() for name, tensor in learner.model.tensors().items()}
    result = learner.learn(latent_samples(1))
    assert result is not None
    largest = {name: float((t - before[name]).abs().max()) for name, t in learner.model.tensors().items()}
    rates = {"retention": 3e-3, "recurrence_weight": 2e-4, "input_bias": 2e-4}
    for name, rate in rates.items():  # Adam's first step is the learning rate, up to its eps
        assert largest[f"{GATES}.{name}"] == pytest.approx(rate, rel=0.05)
    assert largest["model.norm.weight"] == pytest.approx(1e-5, rel=0.05)
    assert 0.99 < result.metrics["latents/embeds_ratio"] < 1
    assert 0 < result.metrics["latents/latent_ratio"] < 0.15
    assert result.metrics["latents/latent_norm"] > 0


def test_a_step_without_any_latent_trains_the_plain_model(directory: Path, tmp_path: Path) -> None:
    learner = learner_of(directory, tmp_path)
    gates = {name: t.clone() for name, t in learner.model.tensors().items() if name.startswith(GATES)}
    result = learner.learn(random_samples(2, 4))
    assert result is not None and "latents/embeds_ratio" not in result.metrics and result.grad_norm > 0
    assert all(torch.equal(learner.model.tensors()[name], gates[name]) for name in gates)


@pytest.mark.parametrize("more", [{}, {"lora": {"r": 4}}], ids=["full", "lora"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(directory: Path, tmp_path: Path, more: Any) -> None:
    learner = learner_of(directory, tmp_path, **more)
    learner.learn(latent_samples(1))
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    resumed = learner_of(directory, tmp_path, "latest", **more)
    for each in (learner, resumed):
        for seed in (2, 3):
            each.learn(latent_samples(seed))
    for name, tensor in learner.model.tensors().items():
        assert torch.equal(tensor, resumed.model.tensors()[name]), name


@pytest.mark.parametrize("more", [{}, {"lora": {"r": 4}}], ids=["full", "lora"])
def test_an_engine_loads_published_gates_and_the_final_model_has_them(
    directory: Path, tmp_path: Path, more: Any
) -> None:
    learner = learner_of(directory, tmp_path / "run", **more)
    learner.learn(latent_samples(1))
    store, version = WeightStore(tmp_path / "weights"), Version(0, 1)
    store.publish(version, learner.model.save_for_engine)
    model = AutoModelForCausalLM.from_pretrained(directory)
    add_gates(model)
    engine = Engine(model, max_model_len=64, decode=lambda ids: "".join(map(chr, ids)), base=directory)
    engine.update_weights(store.path(version), version)
    trained = learner.model.tensors()[f"{GATES}.retention"]
    assert torch.equal(model.latent_gates.retention, trained)
    samples = sampled(engine, HYBRID, [[5, 6, 7], [9] * 20])
    np.testing.assert_allclose(*trainer_logprobs(learner.model, samples), rtol=0, atol=1e-4)

    learner.save_final_model(tmp_path / "model")
    assert torch.equal(read_gates(tmp_path / "model")[f"{GATES}.retention"], trained)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    export(tmp_path / "run" / "step-00000001", tmp_path / "exported")
    assert torch.equal(read_gates(tmp_path / "exported")[f"{GATES}.retention"], trained)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")  # other programs do not read the gates
    assert not hasattr(other, GATES)
    (store.path(version) / GATES_FILE).write_bytes(b"damaged")
    with pytest.raises(Exception, match="damaged"):
        read_published(store.path(version), version, parameters={}, receive=None)
