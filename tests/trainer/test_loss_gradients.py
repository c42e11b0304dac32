"""Value and gradient of every loss against its formula written out token by token, in float64, on random batches."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.trainer.loss import LossOutputs, PackedInputs, ce_loss, k2_loss, k3_loss, ref_kl_loss
from headrace.trainer.losses import policy_loss
from tests.trainer.losses import (
    cispo_loss,
    default_loss,
    gspo_loss,
    icepop_loss,
    ipo_loss,
    ppo_clip_loss,
    reinforce_loss,
)

TOKENS, SEQUENCES = 40, 7


class Token:
    """One token of a batch, with its logprob as a node of autograd's graph."""

    def __init__(self, batch: PackedInputs, index: int) -> None:
        self.t = batch.trainer_logprobs[index]
        self.i = float(batch.inference_logprobs[index])
        self.ref = float(batch.ref_logprobs[index])
        self.a = float(batch.advantages[index])
        self.w = 1.0 if batch.loss_weights is None else float(batch.loss_weights[index])
        self.sequence = int(batch.sequences[index])
        self.rho = torch.exp(self.t - self.i)
        self.d = math.exp(self.t.item()) - math.exp(self.i)


def default_token(x: Token, _: list[Token]) -> Tensor:
    keep = x.d <= 0.2 if x.a > 0 else x.d >= -0.1
    return -keep * 0.7 * x.a * x.rho + 0.01 * (x.t - x.i) ** 2


def ipo_token(x: Token, _: list[Token]) -> Tensor:
    return -(abs(x.d) <= 0.15) * 2.0 * x.a * x.rho + 0.01 * (x.t - x.i) ** 2


def ppo_clip_token(x: Token, _: list[Token]) -> Tensor:
    return -torch.minimum(x.rho * x.a, x.rho.clamp(0.8, 1.28) * x.a)


def gspo_token(x: Token, sequence: list[Token]) -> Tensor:
    s = torch.exp(torch.stack([y.t - y.i for y in sequence]).mean())
    return -torch.minimum(s * x.a, s.clamp(0.9, 1.05) * x.a)


def cispo_token(x: Token, _: list[Token]) -> Tensor:
    return -min(x.rho.item(), 1.5) * x.a * x.t


def icepop_token(x: Token, _: list[Token]) -> Tensor:
    return -x.a * x.rho if 0.5 <= x.rho.item() <= 1.8 else 0.0 * x.t


def reinforce_token(x: Token, _: list[Token]) -> Tensor:
    return -x.a * x.t


def ce_token(x: Token, _: list[Token]) -> Tensor:
    return -x.t


def ref_kl_token(x: Token, _: list[Token]) -> Tensor:
    return -(x.d >= -0.1) * (x.ref - x.t.item()) * x.rho + 0.02 * (x.t - x.i) ** 2


def k2_token(x: Token, _: list[Token]) -> Tensor:
    return (x.t - x.ref) ** 2 / 2


def k3_token(x: Token, _: list[Token]) -> Tensor:
    return torch.exp(x.ref - x.t) - (x.ref - x.t) - 1


CASES: dict[str, tuple[Callable[[PackedInputs], LossOutputs], Callable[[Token, list[Token]], Tensor]]] = {
    "default": (partial(default_loss, dppo_mask_low=0.1, adv_tau=0.7, kl_tau=0.01), default_token),
    "ipo": (partial(ipo_loss, ipo_threshold=0.15, adv_tau=2.0, kl_tau=0.01), ipo_token),
    "ppo_clip": (partial(ppo_clip_loss, eps_high=0.28), ppo_clip_token),
    "gspo": (partial(gspo_loss, eps_low=0.1, eps_high=0.05), gspo_token),
    "cispo": (partial(cispo_loss, eps_max=1.5), cispo_token),
    "icepop": (partial(icepop_loss, beta=1.8), icepop_token),
    "reinforce": (reinforce_loss, reinforce_token),
    "ce": (ce_loss, ce_token),
    "ref_kl": (partial(ref_kl_loss, mask_low=0.1, kl_tau=0.02), ref_kl_token),
    "k2": (k2_loss, k2_token),
    "k3": (k3_loss, k3_token),
    "custom": (
        policy_loss("custom", import_path="tests.trainer.custom_losses:cispo", kwargs={"limit": 1.5}),
        cispo_token,
    ),
}


def random_batch(seed: int, weights: bool = True) -> PackedInputs:
    """Sequences of several lengths, members at random, and one sequence without any."""
    rng = np.random.default_rng(seed)
    lengths = 1 + rng.multinomial(TOKENS - SEQUENCES, [1 / SEQUENCES] * SEQUENCES)
    sequences = np.repeat(rng.permutation(SEQUENCES), lengths)
    sampled = -rng.exponential(1.0, TOKENS)
    trained = np.minimum(sampled + rng.normal(0, 0.5, TOKENS), -1e-3)
    members = (rng.random(TOKENS) < 0.7) & (sequences != rng.integers(SEQUENCES))
    advantages = rng.normal(size=TOKENS) * (rng.random(TOKENS) < 0.8)
    return PackedInputs(
        torch.tensor(trained, requires_grad=True),
        torch.tensor(sampled),
        torch.tensor(-rng.exponential(1.0, TOKENS)),
        torch.tensor(advantages),
        torch.tensor(members),
        torch.tensor(rng.normal(1.0, 1.0, TOKENS)) if weights else None,
        sequences=torch.tensor(sequences),
    )


def written_out(batch: PackedInputs, formula: Callable[[Token, list[Token]], Tensor]) -> Tensor:
    members = [Token(batch, index) for index in range(TOKENS) if batch.loss_mask[index]]
    return sum(x.w * formula(x, [y for y in members if y.sequence == x.sequence]) for x in members)


def gradient(loss: Tensor, batch: PackedInputs) -> Tensor:
    return torch.autograd.grad(loss, batch.trainer_logprobs)[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [True, False])
def test_value_and_gradient_equal_the_formula_of_each_token(name: str, weights: bool):
    loss, formula = CASES[name]
    for seed in range(3):
        batch = random_batch(seed, weights)
        expected, outputs = written_out(batch, formula), loss(batch)
        torch.testing.assert_close(outputs.loss, expected)
        torch.testing.assert_close(gradient(outputs.loss, batch), gradient(expected, batch))


@pytest.mark.parametrize("loss", [k2_loss, k3_loss])
def test_the_gradient_of_a_penalty_is_its_finite_difference(loss: Callable[[PackedInputs], LossOutputs]):
    batch = random_batch(5)
    assert torch.autograd.gradcheck(lambda t: loss(replace(batch, trainer_logprobs=t)).loss, batch.trainer_logprobs)


@pytest.mark.parametrize("loss", [k2_loss, k3_loss])
def test_a_token_without_a_reference_does_not_reach_the_gradient_of_the_others(
    loss: Callable[[PackedInputs], LossOutputs],
):
    batch = random_batch(6)
    lacking = replace(batch, ref_logprobs=batch.ref_logprobs.where(batch.loss_mask, torch.nan))
    assert torch.equal(gradient(loss(lacking).loss, batch), gradient(loss(batch).loss, batch))


@pytest.mark.parametrize("name", CASES)
def test_the_random_batches_reach_every_branch_of_a_loss(name: str):
    metrics = [CASES[name][0](random_batch(seed)).metrics for seed in range(3)]
    for share in [share for share in metrics[0] if share.startswith("is_")]:
        total, count = (float(sum(m[share][part] for m in metrics)) for part in (0, 1))
        assert 0 < total < count


def test_components_that_share_tokens_add_up():
    rl, ce, ref_kl = (CASES[name] for name in ("default", "ce", "ref_kl"))
    batch = random_batch(0)
    shares = [
        replace(batch, loss_mask=other.loss_mask, loss_weights=other.loss_weights)
        for other in (random_batch(1), random_batch(2), random_batch(3))
    ]
    assert (shares[0].loss_mask & shares[1].loss_mask & shares[2].loss_mask).any()
    pairs = list(zip((rl, ce, ref_kl), shares, strict=True))
    together = sum(loss(share).loss for (loss, _), share in pairs)
    apart = sum(gradient(written_out(share, formula), batch) for (_, formula), share in pairs)
    torch.testing.assert_close(gradient(together, batch), apart)


@pytest.mark.parametrize("name", CASES)
def test_a_packed_batch_equals_its_sequences_apart(name: str):
    loss, _ = CASES[name]
    batch = random_batch(4)
    whole = loss(batch)
    parts = [loss(replace(batch, loss_mask=batch.loss_mask & (batch.sequences == n))) for n in range(SEQUENCES)]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for metric, (total, count) in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[metric][0] for part in parts), total)
        assert sum(part.metrics[metric][1] for part in parts) == count
