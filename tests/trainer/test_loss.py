"""The losses on a worked example, what they report, and what broken tokens do to them."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.trainer.loss import LossInputs, LossOutputs, PackedInputs, ce_loss, ref_kl_loss
from tests.trainer.losses import (
    cispo_loss,
    default_loss,
    gspo_loss,
    icepop_loss,
    ipo_loss,
    ppo_clip_loss,
    reinforce_loss,
)

# The worked example (float64): six tokens, all members.
T = torch.tensor([-0.10, -0.50, -2.0, -0.05, -1.2, -0.30], dtype=torch.float64)
I = torch.tensor([-0.20, -0.40, -0.90, -0.90, -1.1, -0.35], dtype=torch.float64)  # noqa: E741
A = torch.tensor([1, -1, -1, 1, 0, 0.5], dtype=torch.float64)
REF = torch.tensor([-0.3, -0.1, -0.5, -0.2, -2.0, -0.25], dtype=torch.float64)
ALL = torch.ones(6, dtype=torch.bool)
ONE_SEQUENCE = torch.zeros(6, dtype=torch.int64)

RATIO_LOSSES = [default_loss, ipo_loss, ppo_clip_loss, gspo_loss, icepop_loss, ref_kl_loss]
LOSSES = [*RATIO_LOSSES, cispo_loss, reinforce_loss, ce_loss]


def example(mask: Tensor = ALL, weights: Tensor | None = None, sequences: Tensor = ONE_SEQUENCE) -> PackedInputs:
    return PackedInputs(T.clone().requires_grad_(), I, REF, A, mask, weights, sequences=sequences)


def mean(outputs: LossOutputs, name: str) -> float:
    total, count = outputs.metrics[name]
    return float(total / count)


def test_default_loss_of_the_worked_example():
    outputs = default_loss(example())
    assert outputs.loss.item() == pytest.approx(-0.724004, abs=1e-6)
    assert mean(outputs, "is_masked") == pytest.approx(2 / 6)  # tokens 2 and 3
    assert mean(outputs, "is_masked_low") == pytest.approx(1 / 6)
    assert mean(outputs, "is_masked_high") == pytest.approx(1 / 6)
    assert mean(outputs, "masked_advantage_positive") == 0.5
    assert mean(outputs, "masked_advantage_negative") == 0.5
    log_ratio = T - I
    mismatch = log_ratio.exp() - log_ratio - 1
    assert mean(outputs, "mismatch_kl") == pytest.approx(float(mismatch.mean()))
    assert mean(outputs, "masked_mismatch_kl") == pytest.approx(float(mismatch[2:4].mean()))
    assert mean(outputs, "unmasked_mismatch_kl") == pytest.approx(float(mismatch[[0, 1, 4, 5]].mean()))


def test_ipo_loss_of_the_worked_example():
    outputs = ipo_loss(example(), ipo_threshold=0.05)
    assert outputs.loss.item() == pytest.approx(-0.523671, abs=1e-6)
    assert mean(outputs, "is_masked") == pytest.approx(4 / 6)  # tokens 0, 1, 2 and 3
    assert set(outputs.metrics) == {"mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked"}


def test_ref_kl_loss_of_the_worked_example():
    outputs = ref_kl_loss(example())
    assert outputs.loss.item() == pytest.approx(0.883318, abs=1e-6)
    assert mean(outputs, "ref_kl/is_masked") == pytest.approx(1 / 6)  # token 2
    assert mean(outputs, "ref_kl") == pytest.approx(float((T - REF).mean()))
    assert set(outputs.metrics) == {
        "ref_kl",
        "ref_kl/is_masked",
        "ref_kl/masked_mismatch_kl",
        "ref_kl/unmasked_mismatch_kl",
    }


def test_ce_loss_is_the_weighted_negative_logprob_of_members():
    members = torch.tensor([True, False, True, True, False, True])
    weights = torch.tensor([1.0, 0.0, 0.5, -1.0, 9.0, 2.0], dtype=torch.float64)
    outputs = ce_loss(example(members, weights))
    assert outputs.loss.item() == pytest.approx(0.10 + 0.5 * 2.0 - 0.05 + 2 * 0.30)
    assert mean(outputs, "ce/nll") == pytest.approx((0.10 + 2.0 + 0.05 + 0.30) / 4)  # the metric is unweighted


# rho = [1.105171, 0.904837, 0.332871, 2.339647, 0.904837, 1.051271]


def test_ppo_clip_loss_of_the_worked_example():
    outputs = ppo_clip_loss(example())
    # Token 2 (A = -1) is held at 0.8, token 3 (A = 1) at 1.2.
    assert outputs.loss.item() == pytest.approx(-(1.105171 - 0.904837 - 0.8 + 1.2 + 0.5 * 1.051271), abs=1e-6)
    assert mean(outputs, "is_clipped") == pytest.approx(2 / 6)
    assert mean(outputs, "is_clipped_low") == pytest.approx(1 / 6)
    assert mean(outputs, "is_clipped_high") == pytest.approx(1 / 6)
    assert mean(outputs, "mismatch_kl") == pytest.approx(float(((T - I).exp() - (T - I) - 1).mean()))


def test_ppo_clips_at_separate_low_and_high_bounds():
    outputs = ppo_clip_loss(example(), eps_low=0.05, eps_high=2.0)
    # Tokens 1 and 2 are held at 0.95; token 3 keeps its ratio.
    assert outputs.loss.item() == pytest.approx(-(1.105171 - 0.95 - 0.95 + 2.339647 + 0.5 * 1.051271), abs=1e-6)
    assert mean(outputs, "is_clipped_high") == 0.0


def test_gspo_loss_of_the_worked_example_as_one_sequence():
    outputs = gspo_loss(example())
    # The mean of l is -0.05, so s = 0.951229: below the clip range, which holds negative advantages at 0.9997.
    assert outputs.loss.item() == pytest.approx(-(2.5 * 0.9512294 - 2 * 0.9997), abs=1e-6)
    assert mean(outputs, "sequence_ratio") == pytest.approx(0.951229, abs=1e-6)
    assert mean(outputs, "is_clipped") == mean(outputs, "is_clipped_low") == pytest.approx(2 / 6)
    assert mean(outputs, "is_clipped_high") == 0.0


def test_gspo_has_a_ratio_per_sequence_over_members_alone():
    members = torch.tensor([True, True, False, True, False, True])
    outputs = gspo_loss(example(members, sequences=torch.tensor([1, 1, 1, 0, 0, 0])))
    # Sequence 1: members 0 and 1, l = 0.1 and -0.1, s = 1. Sequence 0: members 3 and 5, l = 0.85 and 0.05, s = e**0.45,
    # above the clip range, which holds positive advantages at 1.0004.
    assert outputs.loss.item() == pytest.approx(-(1.0 - 1.0 + 1.5 * 1.0004), abs=1e-6)
    assert mean(outputs, "sequence_ratio") == pytest.approx((2 * 1.0 + 2 * 1.568312) / 4, abs=1e-6)
    assert mean(outputs, "is_clipped_high") == pytest.approx(2 / 4)


def test_cispo_loss_of_the_worked_example():
    outputs = cispo_loss(example(), eps_max=2.0)
    products = [1.105171 * -0.10, 0.904837 * 0.50, 0.332871 * 2.0, 2.0 * -0.05, 1.051271 * 0.5 * -0.30]
    assert outputs.loss.item() == pytest.approx(-sum(products), abs=1e-6)
    assert mean(outputs, "is_clipped") == pytest.approx(1 / 6)  # token 3
    assert mean(cispo_loss(example()), "is_clipped") == 0.0
    assert "mismatch_kl" in outputs.metrics


def test_icepop_loss_of_the_worked_example():
    outputs = icepop_loss(example())
    assert outputs.loss.item() == pytest.approx(-(1.105171 - 0.904837 + 2.339647 + 0.5 * 1.051271), abs=1e-6)
    assert mean(outputs, "is_masked") == mean(outputs, "is_masked_low") == pytest.approx(1 / 6)  # token 2
    assert mean(icepop_loss(example(), beta=2.0), "is_masked_high") == pytest.approx(1 / 6)  # token 3
    assert {"mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl"} <= outputs.metrics.keys()


def test_icepop_keeps_ratios_at_its_bounds():
    inputs = one_token(1.0, 0.5, 0.5)  # a ratio of exactly 1
    assert mean(icepop_loss(inputs, alpha=1.0, beta=1.0), "is_masked") == 0.0


def test_reinforce_loss_of_the_worked_example():
    outputs = reinforce_loss(example())
    assert outputs.loss.item() == pytest.approx(-(-0.10 + 0.50 + 2.0 - 0.05 + 0.5 * -0.30))
    assert set(outputs.metrics) == {"mismatch_kl"}


def test_masked_tokens_keep_the_gradient_of_the_squared_log_ratio():
    inputs = example()
    default_loss(inputs, kl_tau=0.5).loss.backward()
    log_ratio = T - I
    torch.testing.assert_close(inputs.trainer_logprobs.grad[2:4], (0.5 * 2 * log_ratio)[2:4])


def one_token(advantage: float, trainer: float, sampled: float) -> LossInputs:
    """A token by its probabilities."""
    t, i, a = (torch.tensor([value], dtype=torch.float64) for value in (trainer, sampled, advantage))
    return LossInputs(t.log(), i.log(), None, a, torch.tensor([True]))


@pytest.mark.parametrize(
    ("advantage", "trainer", "sampled", "masked"),
    [
        (1.0, 0.71, 0.5, True),
        (1.0, 0.69, 0.5, False),
        (1.0, 0.1, 0.9, False),
        (-1.0, 0.29, 0.5, True),
        (-1.0, 0.31, 0.5, False),
        (-1.0, 0.9, 0.1, False),
        (0.0, 0.29, 0.5, True),  # a zero advantage takes the low test
        (0.0, 0.9, 0.1, False),
    ],
)
def test_default_mask_tests_the_side_that_the_advantage_pushes_to(
    advantage: float, trainer: float, sampled: float, masked: bool
):
    assert mean(default_loss(one_token(advantage, trainer, sampled)), "is_masked") == float(masked)


def test_masks_are_strict():
    inputs = one_token(1.0, 0.75, 0.5)
    limit = float(inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp())
    assert mean(default_loss(inputs, dppo_mask_high=limit), "is_masked") == 0.0
    assert mean(default_loss(inputs, dppo_mask_high=limit - 1e-9), "is_masked") == 1.0
    assert mean(ipo_loss(inputs, ipo_threshold=limit), "is_masked") == 0.0
    assert mean(ipo_loss(inputs, ipo_threshold=limit - 1e-9), "is_masked") == 1.0


def test_absent_weights_mean_one():
    assert torch.equal(default_loss(example()).loss, default_loss(example(weights=torch.ones_like(T))).loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_members_give_a_zero_that_still_reaches_the_logprobs(loss):
    inputs = example(~ALL)
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0
    assert not inputs.trainer_logprobs.grad.any()
    assert all(float(count) == 0 and float(total) == 0 for total, count in outputs.metrics.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_at_all_give_a_zero(loss):
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = none.detach()
    inputs = PackedInputs(none, empty, empty, empty, empty.bool(), sequences=empty.long())
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("stream", ["trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "weights"])
def test_what_a_token_holds_that_is_no_member_changes_nothing(loss, broken: float, stream: str):
    members = torch.tensor([False, True, True, True, False, True])
    stream = "loss_weights" if stream == "weights" else stream
    whole, inputs = example(members, torch.ones_like(T)), example(members, torch.ones_like(T))
    holed = getattr(inputs, stream).detach().where(members, broken)
    inputs = replace(inputs, **{stream: holed.requires_grad_(stream == "trainer_logprobs")})
    expected, outputs = loss(whole), loss(inputs)
    expected.loss.backward()
    outputs.loss.backward()
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(inputs.trainer_logprobs.grad, whole.trainer_logprobs.grad)
    assert outputs.metrics == expected.metrics


def one_member_beside_a_plain_one(advantage: float, t: float, i: float) -> PackedInputs:
    """In float32, as in training; each token is a sequence."""
    logprobs = torch.tensor([t, -1.0], requires_grad=True)
    sampled, reference = torch.tensor([i, -1.1]), torch.tensor([t + advantage, -0.5])
    return PackedInputs(
        logprobs, sampled, reference, torch.tensor([advantage, 1.0]), ALL[:2], sequences=torch.tensor([0, 1])
    )


@pytest.mark.parametrize("loss", [default_loss, ppo_clip_loss, gspo_loss, cispo_loss, icepop_loss, reinforce_loss])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_beyond_all_numbers_is_masked_or_clipped_without_a_nan(loss, advantage: float):
    inputs = one_member_beside_a_plain_one(advantage, t=-1e-4, i=-200.0)  # exp(200) is no float32
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert inputs.trainer_logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_token_that_the_trainer_finds_impossible_gives_no_nan(loss, advantage: float):
    inputs = one_member_beside_a_plain_one(advantage, t=-1e4, i=-0.1)
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert inputs.trainer_logprobs.grad.isfinite().all()


def test_an_unbounded_ratio_that_a_loss_keeps_breaks_the_gradient_visibly():
    # PPO does not bound the ratio of a negative advantage from above. The step is then skipped, and said.
    inputs = one_member_beside_a_plain_one(-1.0, t=-1e-4, i=-200.0)
    ppo_clip_loss(inputs).loss.backward()
    assert not inputs.trainer_logprobs.grad[0].isfinite()


@pytest.mark.parametrize(
    "loss", [default_loss, ipo_loss, ppo_clip_loss, gspo_loss, cispo_loss, icepop_loss, reinforce_loss]
)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("token", range(6))
def test_a_member_with_a_broken_advantage_breaks_the_gradient_masked_or_not(loss, broken: float, token: int):
    advantages = A.clone()
    advantages[token] = broken
    inputs = replace(example(), advantages=advantages)
    loss(inputs).loss.backward()
    assert not inputs.trainer_logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("loss", "masked"),
    [
        (default_loss, {2, 3}),
        (partial(ipo_loss, ipo_threshold=0.05), {0, 1, 2, 3}),
        (ppo_clip_loss, {2, 3}),  # ratios 0.33 with A < 0 and 2.34 with A > 0
        (gspo_loss, {1, 2}),  # the sequence's ratio is exp(-0.05): clipped where A < 0
        (partial(cispo_loss, eps_max=2.0), {3}),
        (icepop_loss, {2}),
        (ref_kl_loss, {2}),
    ],
)
def test_losses_say_which_tokens_of_the_worked_example_they_mask(loss, masked: set[int]):
    assert set(loss(example()).masked.nonzero()[:, 0].tolist()) == masked


def test_losses_without_a_mask_say_nothing_of_one():
    assert reinforce_loss(example()).masked is None
    assert ce_loss(example()).masked is None


def test_what_a_loss_of_ones_own_may_read_and_returns():
    assert [field.name for field in fields(LossInputs)] == [
        "trainer_logprobs",
        "inference_logprobs",
        "ref_logprobs",
        "advantages",
        "loss_mask",
        "loss_weights",
    ]
    assert [field.name for field in fields(LossOutputs)] == ["loss", "metrics", "masked"]


def test_ref_kl_without_reference_logprobs_names_the_algorithms_that_provide_them():
    with pytest.raises(ValueError, match=r"ref_logprobs.*opd, opsd"):
        ref_kl_loss(replace(example(), ref_logprobs=None))
