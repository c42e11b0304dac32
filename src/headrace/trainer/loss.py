"""The training losses: pure functions of per-token tensors.

Per token: `t` is the trainer's logprob, `i` the one it was sampled with, `A` its advantage, `m` whether it is a member
of the component, `w` its weight in it; l = t - i, rho = exp(l), d = exp(t) - exp(i). Masks compare `d`, which has no
gradient; rho is never clipped.

    default   w * (-keep * adv_tau * A * rho + kl_tau * m * l**2)    keep: d <= high where A > 0, else d >= -low
    ipo       the same                                               keep: |d| <= threshold
    ce        w * -t
    ref_kl    w * (-keep * stopgrad(ref - t) * rho + kl_tau * m * l**2)    keep: d >= -low

Each returns a sum over its members; the step divides it by the number of members in the whole step. Metrics are sums
and counts over members. Left for later: losses that need a whole sequence at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

MISSING_REFERENCE = (
    "tokens have ref_kl weights but no ref_logprobs: these come from the algorithms that score with a reference model "
    "(opd, opsd); use one of them, or leave ref_kl_weights out"
)
Metrics = dict[str, tuple[Tensor, Tensor]]
"""Sum and count by name."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss may read; every tensor has one value per token. `loss_mask` is this component's members."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    loss: Tensor
    """A sum over members."""
    metrics: Metrics = field(default_factory=dict)


Loss = Callable[[LossInputs], LossOutputs]


def default_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossOutputs:
    """DPPO's binary mask on the probability difference, plus a squared log-ratio that masked tokens keep."""
    difference = _probability_difference(inputs)
    positive = inputs.advantages > 0
    too_high = positive & (difference > dppo_mask_high)
    too_low = ~positive & (difference < -dppo_mask_low)
    masked = too_high | too_low
    outputs = _policy_loss(inputs, adv_tau * inputs.advantages, masked, kl_tau)
    members = inputs.loss_mask
    outputs.metrics["is_masked_low"] = _mean(too_low, members)
    outputs.metrics["is_masked_high"] = _mean(too_high, members)
    outputs.metrics["masked_advantage_positive"] = _mean(positive, members & masked)
    outputs.metrics["masked_advantage_negative"] = _mean(inputs.advantages < 0, members & masked)
    return outputs


def ipo_loss(
    inputs: LossInputs, *, ipo_threshold: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3
) -> LossOutputs:
    """The default loss with a symmetric mask."""
    masked = _probability_difference(inputs).abs() > ipo_threshold
    return _policy_loss(inputs, adv_tau * inputs.advantages, masked, kl_tau)


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Cross-entropy with the token itself as the label."""
    nll = -inputs.trainer_logprobs
    loss = _weighted(nll, inputs).sum()
    return LossOutputs(loss, {"ce/nll": _mean(nll, inputs.loss_mask)})


def ref_kl_loss(inputs: LossInputs, *, mask_low: float = 0.2, kl_tau: float = 1e-3) -> LossOutputs:
    """On-policy distillation: the reference's log-ratio takes the place of the advantage."""
    if inputs.ref_logprobs is None:
        raise ValueError(MISSING_REFERENCE)
    gap = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    masked = _probability_difference(inputs) < -mask_low
    outputs = _policy_loss(inputs, gap, masked, kl_tau)
    named = {
        f"ref_kl/{name}": outputs.metrics[name] for name in ("masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked")
    }
    return LossOutputs(outputs.loss, {**named, "ref_kl": _mean(-gap, inputs.loss_mask)})


def _policy_loss(inputs: LossInputs, credit: Tensor, masked: Tensor, kl_tau: float) -> LossOutputs:
    """The part that all ratio losses share."""
    # Cut non-members off here: further down an infinite ratio times a zero gradient would still be a NaN.
    log_ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).where(inputs.loss_mask, 0.0)
    ratio = log_ratio.exp()
    per_token = -(credit * ratio).where(~masked, 0.0) + kl_tau * log_ratio**2
    mismatch, members = (ratio - log_ratio - 1).detach(), inputs.loss_mask
    metrics = {
        "mismatch_kl": _mean(mismatch, members),
        "masked_mismatch_kl": _mean(mismatch, members & masked),
        "unmasked_mismatch_kl": _mean(mismatch, members & ~masked),
        "is_masked": _mean(masked, members),
    }
    return LossOutputs(_weighted(per_token, inputs).sum(), metrics)


def _probability_difference(inputs: LossInputs) -> Tensor:
    return inputs.trainer_logprobs.detach().exp() - inputs.inference_logprobs.exp()


def _weighted(per_token: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return per_token.where(inputs.loss_mask, 0.0)


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return values.detach().where(mask, 0).sum(), mask.sum()
