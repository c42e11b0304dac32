"""TRL computes the same penalty, loss and gradient, without and with an importance ratio in the penalty."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.rollout.packing import pack
from headrace.trainer.loss import k3_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.step import TrainStep
from tests.trainer.kl_batch import (
    ADVANTAGES,
    COEF,
    COMPLETIONS,
    EPSILON,
    POLICY,
    PROMPT,
    REFERENCE,
    SAMPLED,
    write_model,
)
from tests.trainer.losses import ppo_clip_loss
from tests.trainer.training_samples import Gradients, make_sample

NUMBERS = Path(__file__).parents[1] / "data/kl/trl.json"


@pytest.mark.parametrize("ratio", [False, True])
def test_penalty_loss_and_gradient_are_those_of_trl(tmp_path: Path, ratio: bool):
    """`bnpo` is GRPO's loss with one mean over all tokens of the batch. See tests/data/kl/make_trl_numbers.py."""
    expected = json.loads(NUMBERS.read_text())
    samples = []
    for completion, advantage in zip(COMPLETIONS, ADVANTAGES, strict=True):
        tokens = [*PROMPT, *completion]
        streams = {"advantages": [advantage] * len(tokens), "k3_weights": [COEF] * len(tokens)}
        samples.append(make_sample(tokens, len(PROMPT), **streams))
        samples[-1].logprobs = np.float32([0.0] * len(PROMPT) + SAMPLED[: len(completion)])
    model, reference = (PackedModel(write_model(tmp_path / str(seed), seed)) for seed in (POLICY, REFERENCE))
    optimizer, weights = Gradients(model.named_parameters()), ReferenceWeights(model)
    weights.tensors = ReferenceWeights(reference).tensors
    clipped = partial(ppo_clip_loss, eps_low=EPSILON, eps_high=EPSILON)
    step = TrainStep(model, optimizer, {"rl": clipped, "k3": partial(k3_loss, ratio=ratio)}, 64, weights)
    result = step.run(pack(samples, 32), lr=1.0, traced=True)
    assert result is not None and result.trace is not None
    norm = torch.stack([gradient.norm() for gradient in optimizer.kept.values()]).norm().item()
    trace = result.trace
    gaps = np.where(trace.tokens.members["k3"], trace.tokens.streams["kl_logprobs"] - trace.logprobs, 0.0)
    estimates = np.split(np.expm1(gaps) - gaps, trace.tokens.starts[1:])
    for source, per_token in zip(trace.tokens.sources, estimates, strict=True):
        np.testing.assert_allclose(per_token[len(PROMPT) :], expected["per_token_kl"][source], rtol=1e-6, atol=1e-6)
    numbers = expected["corrected" if ratio else "plain"]
    assert result.metrics["kl/k3"] == pytest.approx(numbers["kl"], rel=1e-6, abs=1e-6)
    assert result.metrics["loss"] == pytest.approx(numbers["loss"], rel=1e-6, abs=1e-6)
    assert norm == pytest.approx(numbers["grad_norm"], rel=1e-5)
    assert abs(expected["corrected"]["kl"] - expected["plain"]["kl"]) > 0.1
