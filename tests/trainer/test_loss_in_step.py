"""Every loss through a whole step: mixed components, nothing to train, several environments, a loss of one's own."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.config.trainer import TrainerConfig
from headrace.errors import Failure
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer import rl
from headrace.trainer.losses import policy_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import StepResult, TrainStep
from headrace.trainer.tokens import COMPONENTS, PENALTIES
from headrace.transport.run_dir import RunDir
from tests.refusals import refused
from tests.trainer.training_samples import (
    ARCHITECTURES,
    make_sample,
    mixed_samples,
    random_samples,
    write_random_model,
)

OWN = "tests.trainer.custom_losses"
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "ipo": {},
    "ppo_clip": {},
    "gspo": {},
    "cispo": {},
    "icepop": {},
    "reinforce": {},
    "custom": {"import_path": f"{OWN}:mean_advantage"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory = write_random_model(tmp_path_factory.mktemp("model"), ARCHITECTURES["qwen3"])
    return PackedModel(directory)


class Gradients(Optimizer):
    """Keeps the gradients instead of applying them."""

    def step(self, lr: float) -> float:
        self.kept = {name: parameter.grad.clone() for name, parameter in self.parameters.items()}
        self.zero_grad()
        return 0.0


def run(
    model: PackedModel, kind: str, samples: list[Sample], envs: Sequence[str] = (), micro_batch_tokens: int = 16384
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    optimizer = Gradients(model.named_parameters())
    losses = rl.make_losses(TrainerConfig(loss={"type": kind, **KINDS[kind]}))
    step = TrainStep(model, optimizer, losses, micro_batch_tokens)
    result = step.run(pack(samples, 32), lr=1.0, envs=envs)
    assert result is not None
    return result, optimizer.kept


def assert_same(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(given[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-8, rtol=1e-3)


def only(component: str, samples: list[Sample]) -> list[Sample]:
    """The same samples with the weights of one component, the others' at 0; penalties belong to the tokens of rl."""
    kept = (component, *PENALTIES) if component == "rl" else (component,)

    def streams(sample: Sample) -> dict[str, np.ndarray]:
        others = [f"{other}_weights" for other in COMPONENTS if other not in kept]
        return {name: np.zeros_like(v) if name in others else v for name, v in sample.streams.items()}

    return [msgspec.structs.replace(sample, streams=streams(sample)) for sample in samples]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_components_in_one_micro_batch_equal_the_components_apart(model: PackedModel, kind: str):
    samples = mixed_samples(seed=1)
    mixed, gradients = run(model, kind, samples)
    apart = [run(model, kind, only(component, samples)) for component in ("rl", "ce", "ref_kl")]
    assert mixed.metrics["loss"] == pytest.approx(sum(result.metrics["loss"] for result, _ in apart), rel=1e-4)
    assert_same(gradients, {name: sum(kept[name] for _, kept in apart) for name in gradients})
    for name, value in apart[0][0].metrics.items():
        if name not in ("loss", "entropy"):
            assert mixed.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["gspo", "custom"])
def test_a_loss_of_whole_sequences_does_not_depend_on_how_the_step_is_cut(model: PackedModel, kind: str):
    samples = random_samples(seed=2, count=9)
    whole, expected = run(model, kind, samples)
    cut, gradients = run(model, kind, samples, micro_batch_tokens=1)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)
    assert_same(gradients, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_sample_without_members_adds_nothing(model: PackedModel, kind: str):
    samples = random_samples(seed=3, count=4)
    cut_off = make_sample(
        list(range(40)), 35, advantages=[1.0] * 40
    )  # its completion starts beyond the sequence length
    without, expected = run(model, kind, samples)
    result, gradients = run(model, kind, [*samples, cut_off])
    assert result.metrics == pytest.approx(without.metrics, rel=1e-5, abs=1e-7)
    assert_same(gradients, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_any_member_changes_nothing(model: PackedModel, kind: str):
    sample = make_sample([1, 2, 3], 1, advantages=[0, 1, 1], rl_weights=[0, 0, 0])
    result, gradients = run(model, kind, [sample])
    assert result.metrics["loss"] == 0.0
    assert gradients
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["gspo", "custom"])
def test_metrics_by_environment_are_those_of_its_sequences_alone(model: PackedModel, kind: str):
    samples, envs = random_samples(seed=4, count=6), ("letters", "numbers", "numbers", "letters", "letters", "numbers")
    result, _ = run(model, kind, samples, envs)
    for env in set(envs):
        alone, _ = run(model, kind, [s for s, e in zip(samples, envs, strict=True) if e == env])
        for name in alone.metrics:
            assert result.metrics[f"{name}/{env}"] == pytest.approx(alone.metrics[name], rel=1e-4, abs=1e-6)


def test_a_loss_of_ones_own_trains_a_run_by_its_import_path(tmp_path: Path, tiny_model: Path):
    run_dir = RunDir(tmp_path / "run")
    samples = [BatchSample(sample, "letters", i) for i, sample in enumerate(random_samples(1, 6))]
    for entry in samples:
        entry.sample.versions[entry.sample.mask] = 0
    run_dir.batches.prepare(Batch(1, 0, samples))
    run_dir.batches.announce(1)
    config = TrainerConfig.model_validate(
        {
            "model": {"name": str(tiny_model)},
            "output_dir": run_dir.root,
            "max_steps": 1,
            "seq_len": 32,
            "loss": {"type": "custom", "import_path": f"{OWN}:cispo", "kwargs": {"limit": 2.0}},
        }
    )
    status = Status(tmp_path / "status", "trainer")
    rl.RlTrainer(config, stopped=threading.Event(), status=status).run()
    status.close("done")
    (record,) = read_metrics(run_dir.metrics)
    assert record["own/sequences"] == 1.0
    assert record["mismatch_kl"] > 0  # every loss reports it
    assert record["optim/grad_norm"] > 0


@pytest.mark.parametrize(
    ("import_path", "kwargs", "key"),
    [
        ("nowhere", {}, "trainer.loss.import_path"),
        (f"{OWN}:nothing", {}, "trainer.loss.import_path"),
        (f"{OWN}:cispo", {}, "trainer.loss.kwargs"),
        (f"{OWN}:cispo", {"limt": 1.0}, "trainer.loss.kwargs"),
    ],
)
def test_a_loss_that_cannot_be_loaded_is_refused_at_the_start(import_path: str, kwargs: dict[str, Any], key: str):
    with refused(key=key):
        policy_loss("custom", import_path=import_path, kwargs=kwargs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("returns_a_tensor", r"Tensor.*LossOutputs"),
        ("returns_a_loss_per_token", "scalar"),
        ("reports_the_loss", "'loss'"),
        ("says_masked_for_two_tokens", r"\(2,\).*`masked`.*\b1\b"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_at_the_start(name: str, message: str):
    with pytest.raises(Failure, match=message):
        policy_loss("custom", import_path=f"{OWN}:{name}", kwargs={})


def test_a_loss_that_reports_other_metrics_for_other_sequences_is_refused(model: PackedModel, monkeypatch):
    monkeypatch.setitem(KINDS, "custom", {"import_path": f"{OWN}:changes_its_metrics"})
    with pytest.raises(Failure, match="own/long"):
        run(model, "custom", random_samples(seed=5, count=4))


@pytest.mark.parametrize("name", ["detached", "in_numpy", "without_gradients"])
def test_a_loss_without_a_gradient_is_refused_at_the_start_by_name_and_file(name: str):
    with pytest.raises(Failure, match=rf"'{OWN}:{name}'.*custom_losses\.py.*gradient"):
        policy_loss("custom", import_path=f"{OWN}:{name}", kwargs={})


def test_a_loss_that_has_no_gradient_for_a_real_sequence_is_refused_in_the_first_step(model: PackedModel, monkeypatch):
    monkeypatch.setitem(KINDS, "custom", {"import_path": f"{OWN}:detached_from_two_tokens_on"})
    with pytest.raises(Failure, match="gradient"):
        run(model, "custom", random_samples(seed=5, count=4))


def test_a_batch_without_advantages_has_a_gradient_of_zeros_and_is_no_mistake(model: PackedModel):
    samples = random_samples(seed=5, count=4)
    for sample in samples:
        sample.set_stream("advantages", np.zeros(len(sample)))
    _, gradients = run(model, "custom", samples)
    assert all(not gradient.any() for gradient in gradients.values())


def test_a_sequence_that_a_loss_leaves_out_with_a_constant_0_is_no_mistake(model: PackedModel, monkeypatch):
    samples = random_samples(seed=5, count=6)
    bad = [sample for sample in samples if sample.streams["advantages"].min() < 0]
    assert 0 < len(bad) < len(samples)
    monkeypatch.setitem(KINDS, "custom", {"import_path": f"{OWN}:leaves_out_what_was_bad"})
    _, given = run(model, "custom", samples, envs=["a", "b"] * 3)
    for sample in bad:
        sample.set_stream("advantages", np.zeros(len(sample)))
    _, expected = run(model, "reinforce", samples)
    assert_same(given, expected)
