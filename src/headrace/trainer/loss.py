"""The training losses: pure functions of per-token tensors.

Per token: `t` is the trainer's logprob, `i` the one it was sampled with, `A` its advantage, `m` whether it is a member
of the component, `w` its weight in it; l = t - i, rho = exp(l), d = exp(t) - exp(i). Each line is multiplied by w * m;
masks and bounds have no gradient.

    default    -keep * adv_tau * A * rho + kl_tau * l**2          keep: d <= high where A > 0, else d >= -low
    ipo        the same                                           keep: |d| <= threshold
    ppo_clip   -min(rho * A, clip(rho) * A)                       clip: to 1 - eps_low .. 1 + eps_high
    gspo       the same, with s for rho                           s = exp(mean of l over the sequence's members)
    cispo      -stopgrad(min(rho, eps_max)) * A * t
    icepop     -keep * A * rho                                    keep: alpha <= rho <= beta
    reinforce  -A * t
    ce         -t
    ref_kl     -keep * stopgrad(ref - t) * rho + kl_tau * l**2    keep: d >= -low
    k2         (t - ref)**2 / 2
    k3         exp(ref - t) - (ref - t) - 1

k2 and k3 estimate the divergence from a reference policy, times rho if `ratio` is set. All but the last
four are losses of the rl component (`headrace.trainer.losses.shipped`). Each returns a sum over its members; the step
divides it by the number of members in the whole step, k2 and k3 by that of rl. Metrics are sums and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.rollout.packing import MISSING_REFERENCE

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "tuple[Tensor, Tensor]"]
"""Sum and count of each metric by name."""
RESERVED_METRICS = {"loss", "entropy"}
"""Metrics that the step reports itself; a loss must use other names."""


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss; every tensor has one value per token. `loss_mask` marks the members of this component."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PackedInputs(LossInputs):
    """The tokens of several whole sequences, end to end."""

    sequences: Tensor
    """For each token the number of its sequence, which is below the number of tokens."""


@dataclass(frozen=True)
class LossOutputs:
    """The result of a loss: a sum over its member tokens, and metrics."""

    loss: Tensor
    metrics: Metrics = field(default_factory=dict)
    masked: Tensor | None = None
    """Per token, whether the loss masked, clipped or capped it, for `headrace tokens`. None: not reported."""


Loss = Callable[[PackedInputs], LossOutputs]


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Return the negative log-likelihood of the tokens."""
    nll = -zero_others(inputs.trainer_logprobs, inputs)
    return LossOutputs(weighted_sum(nll, inputs), {"ce/nll": masked_mean(nll, inputs.loss_mask)})


def ref_kl_loss(inputs: LossInputs, *, mask_low: float = 0.2, kl_tau: float = 1e-3) -> LossOutputs:
    """Return the loss of on-policy distillation: the reference's log-ratio takes the place of the advantage."""
    if inputs.ref_logprobs is None:
        raise ValueError(MISSING_REFERENCE)
    gap = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    masked = probability_difference(inputs) < -mask_low
    outputs = masked_ratio_loss(inputs, gap, masked, kl_tau)
    named = {
        f"ref_kl/{name}": outputs.metrics[name] for name in ("masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked")
    }
    return LossOutputs(outputs.loss, {**named, "ref_kl": masked_mean(-gap, inputs.loss_mask)}, masked)


def k2_loss(inputs: LossInputs, ratio: bool = False) -> LossOutputs:
    """Return the penalty (t - ref)**2 / 2; `ratio` multiplies it by rho."""
    gap = _reference_gap(inputs)
    return _penalty("k2", gap**2 / 2, inputs, ratio)


def k3_loss(inputs: LossInputs, ratio: bool = False) -> LossOutputs:
    """Return the penalty exp(ref - t) - (ref - t) - 1; `ratio` multiplies it by rho."""
    gap = _reference_gap(inputs)
    return _penalty("k3", gap.expm1() - gap, inputs, ratio)


def _reference_gap(inputs: LossInputs) -> Tensor:
    if inputs.ref_logprobs is None:
        raise ValueError("tokens have k2_weights or k3_weights but no kl_logprobs")
    # Masked first: other tokens may have no logprob of the reference, and NaN would reach the gradient.
    return zero_others(inputs.ref_logprobs - inputs.trainer_logprobs, inputs)


def _penalty(name: str, per_token: Tensor, inputs: LossInputs, ratio: bool) -> LossOutputs:
    if ratio:
        per_token = per_token * log_ratios(inputs).exp()
    return LossOutputs(weighted_sum(per_token, inputs), {f"kl/{name}": masked_mean(per_token, inputs.loss_mask)})


def masked_ratio_loss(inputs: LossInputs, credit: Tensor, masked: Tensor, kl_tau: float) -> LossOutputs:
    """Return -credit * rho where it is not masked, plus kl_tau * l**2 everywhere."""
    log_ratio = log_ratios(inputs)
    per_token = -_credited_ratio(credit, log_ratio, ~masked)
    if kl_tau:
        per_token = per_token + kl_tau * log_ratio**2
    mismatch, members = _mismatch(log_ratio), inputs.loss_mask
    metrics = {
        "mismatch_kl": masked_mean(mismatch, members),
        "masked_mismatch_kl": masked_mean(mismatch, members & masked),
        "unmasked_mismatch_kl": masked_mean(mismatch, members & ~masked),
        "is_masked": masked_mean(masked, members),
    }
    return LossOutputs(weighted_sum(per_token, inputs), metrics, masked)


def clipped_ratio_loss(inputs: LossInputs, log_ratio: Tensor, eps_low: float, eps_high: float) -> LossOutputs:
    """Return -min(ratio * A, clip(ratio) * A). The clipped side, where it is the smaller, has no gradient."""
    advantages, ratio = zero_others(inputs.advantages, inputs), log_ratio.detach().exp()
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    clipped = too_low | too_high
    bounded = (1 - eps_low) * advantages.where(too_low, 0.0) + (1 + eps_high) * advantages.where(too_high, 0.0)
    per_token = -(_credited_ratio(advantages, log_ratio, ~clipped) + bounded)
    metrics = {
        "mismatch_kl": mismatch_kl(inputs),
        "is_clipped": masked_mean(clipped, inputs.loss_mask),
        "is_clipped_low": masked_mean(too_low, inputs.loss_mask),
        "is_clipped_high": masked_mean(too_high, inputs.loss_mask),
    }
    return LossOutputs(weighted_sum(per_token, inputs), metrics, clipped)


def _credited_ratio(credit: Tensor, log_ratio: Tensor, keep: Tensor) -> Tensor:
    """Return credit * ratio where it is kept, else 0."""
    # A credit that is not finite is kept: the step is then skipped and logged, instead of the token unnoticed.
    keep = (keep & (credit != 0)) | ~credit.isfinite()
    # Masked before the exponential: after it, an infinite ratio times a zero gradient would be NaN.
    return (credit * log_ratio.where(keep, 0.0).exp()).where(keep, 0.0)


def log_ratios(inputs: LossInputs) -> Tensor:
    """Return l = t - i, 0 for tokens that are not members."""
    return zero_others(inputs.trainer_logprobs - inputs.inference_logprobs, inputs)


def zero_others(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return the values with 0 for tokens that are not members, so that those do not reach the gradient."""
    return values.where(inputs.loss_mask, 0.0)


def mean_of_sequence(values: Tensor, inputs: PackedInputs) -> Tensor:
    """Return for each token the mean over the members of its sequence; `values` must be 0 for other tokens."""
    count = values.new_zeros(values.shape).index_add(0, inputs.sequences, inputs.loss_mask.to(values.dtype))
    total = values.new_zeros(values.shape).index_add(0, inputs.sequences, values)
    return (total / count.clamp(min=1)).index_select(0, inputs.sequences)


def probability_difference(inputs: LossInputs) -> Tensor:
    """Return d = exp(t) - exp(i), without a gradient."""
    return inputs.trainer_logprobs.detach().exp() - inputs.inference_logprobs.exp()


def _mismatch(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate of the divergence between trainer and engine, which is never negative."""
    return (log_ratio.exp() - log_ratio - 1).detach()


def mismatch_kl(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    return masked_mean(_mismatch(log_ratios(inputs)), inputs.loss_mask)


def weighted_sum(per_token: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return zero_others(per_token, inputs).sum()


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the masked values as their sum and count."""
    return values.detach().where(mask, 0).sum(), mask.sum()
