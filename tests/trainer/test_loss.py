"""The losses against the worked example of their specification, and gradients against the formulas written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.trainer.loss import LossInputs, ce_loss, default_loss, ipo_loss, ref_kl_loss

# The worked example (float64): six tokens, all members.
T = torch.tensor([-0.10, -0.50, -2.0, -0.05, -1.2, -0.30], dtype=torch.float64)
I = torch.tensor([-0.20, -0.40, -0.90, -0.90, -1.1, -0.35], dtype=torch.float64)  # noqa: E741
A = torch.tensor([1, -1, -1, 1, 0, 0.5], dtype=torch.float64)
REF = torch.tensor([-0.3, -0.1, -0.5, -0.2, -2.0, -0.25], dtype=torch.float64)
ALL = torch.ones(6, dtype=torch.bool)


def example(mask: Tensor = ALL, weights: Tensor | None = None) -> LossInputs:
    return LossInputs(T.clone().requires_grad_(), I, REF, A, mask, weights)


def mean(outputs, name: str) -> float:
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


def default_formula(t: Tensor, w: Tensor) -> Tensor:
    d = t.detach().exp() - I.exp()
    keep = ~torch.where(A > 0, d > 0.2, d < -0.2)
    return (w * (-(keep * A) * (t - I).exp() + 1e-3 * (t - I) ** 2)).sum()


def ipo_formula(t: Tensor, w: Tensor) -> Tensor:
    keep = (t.detach().exp() - I.exp()).abs() <= 0.1
    return (w * (-(keep * A) * (t - I).exp() + 1e-3 * (t - I) ** 2)).sum()


def ref_kl_formula(t: Tensor, w: Tensor) -> Tensor:
    keep = t.detach().exp() - I.exp() >= -0.2
    return (w * (-(keep * (REF - t).detach()) * (t - I).exp() + 1e-3 * (t - I) ** 2)).sum()


def ce_formula(t: Tensor, w: Tensor) -> Tensor:
    return (-t * w).sum()


@pytest.mark.parametrize(
    ("loss", "formula"),
    [(default_loss, default_formula), (ipo_loss, ipo_formula), (ref_kl_loss, ref_kl_formula), (ce_loss, ce_formula)],
)
def test_value_and_gradient_equal_the_plain_formula(loss, formula):
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
    for members in (ALL, torch.tensor([True, False, True, False, True, False])):
        inputs, t = example(members, weights), T.clone().requires_grad_()
        outputs = loss(inputs)
        expected = formula(t, weights * members)
        torch.testing.assert_close(outputs.loss, expected)
        wanted = torch.autograd.grad(expected, t)[0]
        torch.testing.assert_close(torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0], wanted)


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


def test_no_members_give_a_zero_that_still_reaches_the_logprobs():
    for loss in (default_loss, ipo_loss, ce_loss, ref_kl_loss):
        inputs = example(~ALL)
        outputs = loss(inputs)
        outputs.loss.backward()
        assert outputs.loss.item() == 0.0
        assert not inputs.trainer_logprobs.grad.any()
        assert all(float(count) == 0 and float(total) == 0 for total, count in outputs.metrics.values())


def test_an_infinite_ratio_outside_the_members_does_not_poison_the_gradient():
    members = ALL.clone()
    members[0] = False
    inputs = replace(example(members), inference_logprobs=torch.where(members, I, -torch.inf))
    for loss in (default_loss, ipo_loss, ref_kl_loss):
        inputs = replace(inputs, trainer_logprobs=T.clone().requires_grad_())
        loss(inputs).loss.backward()
        assert inputs.trainer_logprobs.grad.isfinite().all()


def test_ref_kl_without_reference_logprobs_names_the_algorithms_that_provide_them():
    with pytest.raises(ValueError, match=r"no ref_logprobs.*opd, opsd"):
        ref_kl_loss(replace(example(), ref_logprobs=None))
