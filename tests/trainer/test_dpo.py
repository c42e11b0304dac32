"""The loss of preference pairs: TRL's numbers, finite differences, and any split of the step."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.rollout.packing import Cost, pack, pack_for_worker
from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.trainer.dpo import pair_loss
from headrace.trainer.loss import PackedInputs
from headrace.trainer.model import PackedModel
from headrace.trainer.sft import Validation, sequence_logprobs
from headrace.trainer.step import TrainStep
from headrace.trainer.tokens import StepTokens
from tests.trainer.dpo_batch import PAIRS, POLICY, REFERENCE, write_model
from tests.trainer.training_samples import Gradients

RESULTS = json.loads((Path(__file__).parents[1] / "data" / "dpo" / "trl.json").read_text())["results"]
NAMES = {
    "rewards/chosen": "dpo/chosen_reward",
    "rewards/rejected": "dpo/rejected_reward",
    "rewards/accuracies": "dpo/accuracy",
    "rewards/margins": "dpo/margin",
}
SEQ_LEN = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {seed: write_model(tmp_path_factory.mktemp("model"), seed) for seed in (POLICY, REFERENCE)}


def samples_of(pairs: list[dict[str, list[int]]]) -> list[Sample]:
    samples = []
    for pair in pairs:
        for side, sign in (("chosen_ids", 1.0), ("rejected_ids", -1.0)):
            tokens = np.array(pair["prompt_ids"] + pair[side])
            mask = np.arange(len(tokens)) >= len(pair["prompt_ids"])
            unknown = np.full(len(tokens), NOT_SAMPLED)
            sample = Sample(tokens, mask, np.zeros(len(tokens)), unknown, len(pair["prompt_ids"]))
            sample.set_stream("advantages", np.where(mask, sign, 0.0))
            samples.append(sample)
    return samples


def with_reference(samples: list[Sample], directory: Path) -> list[Sample]:
    totals = sequence_logprobs(PackedModel(directory), samples, SEQ_LEN, lambda: False)
    for sample, total in zip(samples, totals, strict=True):
        logprobs = np.zeros(len(sample))
        logprobs[sample.mask.argmax()] = total
        sample.set_stream("ref_logprobs", logprobs)
    return samples


@pytest.mark.parametrize("micro_batch_tokens", [16384, 1])
@pytest.mark.parametrize("expected", RESULTS, ids=lambda r: f"{r['loss_type']}, free: {r['reference_free']}")
def test_loss_gradient_and_metrics_are_trls(models: dict[int, Path], expected: dict[str, Any], micro_batch_tokens: int):
    samples = samples_of(PAIRS)
    if not expected["reference_free"]:
        samples = with_reference(samples, models[REFERENCE])
    model = PackedModel(models[POLICY])
    loss = partial(pair_loss, loss=expected["loss_type"], beta=expected["beta"])
    gradients = Gradients(model.named_parameters())
    result = TrainStep(model, gradients, {"rl": loss}, micro_batch_tokens, unit_size=2).run(
        pack(samples, SEQ_LEN, 2), 0.0
    )
    assert result.metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    norm = torch.stack([gradient.norm() for gradient in gradients.kept.values()]).norm().item()
    assert norm == pytest.approx(expected["grad_norm"], rel=1e-4)
    for theirs, ours in NAMES.items():
        assert result.metrics[ours] == pytest.approx(expected["metrics"][theirs], abs=2e-5)
    measured = Validation(model, samples, SEQ_LEN, "rl", loss, unit_size=2).measure()
    names = {ours.removeprefix("dpo/"): expected["metrics"][theirs] for theirs, ours in NAMES.items()}
    assert measured == pytest.approx({"loss": expected["loss"], **names}, abs=2e-5)


def test_a_pair_shares_the_tokens_of_its_prompt(models: dict[int, Path]):
    step = TrainStep(
        model := PackedModel(models[POLICY]),
        Gradients(model.named_parameters()),
        {"rl": partial(pair_loss, loss="sigmoid", beta=0.1)},
        1,  # one pair at a time
        unit_size=2,
    )
    result = step.run(pack(samples_of(PAIRS), SEQ_LEN, 2), 0.0)
    # The last token of each sequence predicts nothing, and the second pair begins its answers with the same token.
    own = [len(p["prompt_ids"]) + len(p["chosen_ids"]) + len(p["rejected_ids"]) - 2 for p in PAIRS]
    assert result.computed_tokens == sum(own) - 1


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("has_reference", [True, False])
def test_gradients_are_finite_differences(loss: str, has_reference: bool):
    rng = np.random.default_rng(0)
    sequences = np.repeat(np.arange(6), [3, 1, 2, 4, 1, 5])
    shape = sequences.shape
    mask = torch.from_numpy(rng.random(shape) < 0.8)
    for first in np.unique(sequences, return_index=True)[1]:
        mask[first] = True  # no side is empty
    t = torch.from_numpy(-rng.exponential(size=shape)).requires_grad_()
    inputs = PackedInputs(
        t,
        torch.zeros(shape, dtype=torch.float64),
        torch.from_numpy(-rng.exponential(size=shape)) if has_reference else None,
        torch.from_numpy(np.where(sequences % 2 == 0, 1.0, -1.0)),
        mask,
        sequences=torch.from_numpy(sequences),
    )

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        parts = {**inputs.__dict__, "trainer_logprobs": logprobs}
        return pair_loss(PackedInputs(**parts), loss=loss, beta=0.4).loss

    assert torch.autograd.gradcheck(value, t)
    (gradient,) = torch.autograd.grad(value(t), t)
    assert not gradient[~mask].any()
    assert gradient[mask].abs().min() > 0


def test_pairs_stay_together_on_every_worker_and_in_every_micro_batch():
    rng = np.random.default_rng(0)
    pairs = [
        {
            "prompt_ids": list(map(int, rng.integers(3, 6, rng.integers(1, 9)))),
            "chosen_ids": list(map(int, rng.integers(6, 90, rng.integers(1, 12)))),
            "rejected_ids": list(map(int, rng.integers(6, 90, rng.integers(1, 12)))),
        }
        for _ in range(23)
    ]
    seen = []
    for worker in range(3):
        bins = pack_for_worker(worker, samples_of(pairs), SEQ_LEN, 3, Cost(1, 1), unit_size=2)
        tokens = StepTokens(bins, 2)
        groups = tokens.cut(40)
        assert len(groups) > 1
        for group in groups:
            sources = tokens.sources[group].tolist()
            assert [source // 2 for source in sources[::2]] == [source // 2 for source in sources[1::2]]
            assert all(source % 2 == number % 2 for number, source in enumerate(sources))
            seen += sources
        assert tokens.count("rl") == sum(map(len, groups)) // 2
    assert sorted(seen) == list(range(46))
