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

All but the last two are losses of the rl component. Each returns a sum over its members; the step divides it by the
number of members in the whole step. Metrics are sums and counts over members.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from headrace.errors import BadInput, Failure
from headrace.imports import load
from headrace.rollout.packing import MISSING_REFERENCE

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Sum and count by name."""
TAKEN_METRICS = {"loss", "entropy"}
"""What the step itself reports."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss may read; every tensor has one value per token. `loss_mask` is this component's members."""

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
    """Which sequence each token is of, by a number below the number of tokens."""


@dataclass(frozen=True)
class LossOutputs:
    loss: Tensor
    """A sum over members."""
    metrics: Metrics = field(default_factory=dict)
    masked: Tensor | None = None
    """Per token, whether a mask, clip or cap of the loss took hold of it, for people to look at. None: it has none."""


Loss = Callable[[PackedInputs], LossOutputs]


def policy_loss(kind: str, **settings: Any) -> Loss:
    """The loss of the rl component by its name in the configuration, with its settings bound."""
    if kind == "custom":
        return CustomLoss(**settings)
    losses: dict[str, Callable[..., LossOutputs]] = {
        "default": default_loss,
        "ipo": ipo_loss,
        "ppo_clip": ppo_clip_loss,
        "gspo": gspo_loss,
        "cispo": cispo_loss,
        "icepop": icepop_loss,
        "reinforce": reinforce_loss,
    }
    return partial(losses[kind], **settings)


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
    outputs = _masked_ratio_loss(inputs, adv_tau * inputs.advantages, masked, kl_tau)
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
    return _masked_ratio_loss(inputs, adv_tau * inputs.advantages, masked, kl_tau)


def ppo_clip_loss(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """PPO's pessimistic clip of each token's ratio. DAPO's clip-higher is 0.2 and 0.28."""
    return _clipped_ratio_loss(inputs, _log_ratio(inputs), eps_low, eps_high)


def gspo_loss(inputs: PackedInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossOutputs:
    """PPO's clip of one ratio per sequence, the geometric mean of its members' ratios."""
    log_ratio = _mean_of_sequence(_log_ratio(inputs), inputs)
    outputs = _clipped_ratio_loss(inputs, log_ratio, eps_low, eps_high)
    outputs.metrics["sequence_ratio"] = _mean(log_ratio.exp(), inputs.loss_mask)
    return outputs


def cispo_loss(inputs: LossInputs, *, eps_max: float = 5.0) -> LossOutputs:
    """REINFORCE with a truncated importance weight: unlike a clipped ratio, no token loses its gradient."""
    ratio = _log_ratio(inputs).detach().exp()
    capped = ratio > eps_max
    per_token = -ratio.clamp(max=eps_max) * inputs.advantages * _of_members(inputs.trainer_logprobs, inputs)
    metrics = {"mismatch_kl": _mismatch_kl(inputs), "is_clipped": _mean(capped, inputs.loss_mask)}
    return LossOutputs(_weighted_sum(per_token, inputs), metrics, capped)


def icepop_loss(inputs: LossInputs, *, alpha: float = 0.5, beta: float = 5.0) -> LossOutputs:
    """Drops the tokens on which trainer and engine disagree too much, in either direction."""
    ratio = _log_ratio(inputs).detach().exp()
    too_low, too_high = ratio < alpha, ratio > beta
    outputs = _masked_ratio_loss(inputs, inputs.advantages, too_low | too_high, kl_tau=0.0)
    outputs.metrics["is_masked_low"] = _mean(too_low, inputs.loss_mask)
    outputs.metrics["is_masked_high"] = _mean(too_high, inputs.loss_mask)
    return outputs


def reinforce_loss(inputs: LossInputs) -> LossOutputs:
    """The plain policy gradient: no correction for the policy that sampled."""
    per_token = -inputs.advantages * _of_members(inputs.trainer_logprobs, inputs)
    return LossOutputs(_weighted_sum(per_token, inputs), {"mismatch_kl": _mismatch_kl(inputs)})


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Cross-entropy with the token itself as the label."""
    nll = -_of_members(inputs.trainer_logprobs, inputs)
    return LossOutputs(_weighted_sum(nll, inputs), {"ce/nll": _mean(nll, inputs.loss_mask)})


def ref_kl_loss(inputs: LossInputs, *, mask_low: float = 0.2, kl_tau: float = 1e-3) -> LossOutputs:
    """On-policy distillation: the reference's log-ratio takes the place of the advantage."""
    if inputs.ref_logprobs is None:
        raise ValueError(MISSING_REFERENCE)
    gap = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    masked = _probability_difference(inputs) < -mask_low
    outputs = _masked_ratio_loss(inputs, gap, masked, kl_tau)
    named = {
        f"ref_kl/{name}": outputs.metrics[name] for name in ("masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked")
    }
    return LossOutputs(outputs.loss, {**named, "ref_kl": _mean(-gap, inputs.loss_mask)}, masked)


class CustomLoss:
    """A user's own function of one sequence, `package.module:function`.

    It sees the sequence's trained tokens of all components, in order; `loss_mask` says which are members of this one.
    Sequences without members are not shown to it. It is called once at the start, with a sequence of one token, since
    every rank must report the same metrics, also one that has no sequence. A loss without a gradient is refused, unless
    it is 0: so a function may leave a sequence out.
    """

    def __init__(self, import_path: str, kwargs: dict[str, Any]) -> None:
        self.import_path = import_path
        function = load(import_path, "trainer.loss.import_path")
        try:
            inspect.signature(function).bind(None, **kwargs)
        except TypeError as error:
            raise BadInput(
                f"{import_path} does not take them: {error}", key="trainer.loss.kwargs", value=kwargs
            ) from error
        self._function = partial(function, **kwargs)
        one = torch.ones(1)
        sequence = LossInputs((-one).requires_grad_(), -one, -one, one, one.bool(), one)
        outputs = self._function(sequence)
        self._check(outputs, sequence)
        self._metrics = list(outputs.metrics)
        self._tells_masked = outputs.masked is not None

    def __call__(self, inputs: PackedInputs) -> LossOutputs:
        loss = inputs.trainer_logprobs.new_zeros(())
        sums = {name: (torch.zeros_like(loss), torch.zeros_like(loss)) for name in self._metrics}
        masked = torch.zeros_like(inputs.loss_mask)
        for place, sequence in _split(inputs):
            outputs = self._function(sequence)
            self._check(outputs, sequence)
            if outputs.metrics.keys() != sums.keys():
                raise Failure(
                    f"loss {self.import_path!r} reported {', '.join(outputs.metrics) or 'no metrics'} for one sequence "
                    f"and {', '.join(sums) or 'none'} for another: report the same metrics always"
                )
            loss = loss + outputs.loss
            sums = {name: (s + outputs.metrics[name][0], c + outputs.metrics[name][1]) for name, (s, c) in sums.items()}
            if outputs.masked is not None:
                masked[place] = outputs.masked
        metrics = {"mismatch_kl": _mismatch_kl(inputs), **sums}
        return LossOutputs(loss, metrics, masked if self._tells_masked else None)

    def _check(self, outputs: Any, sequence: LossInputs) -> None:
        if not isinstance(outputs, LossOutputs):
            raise Failure(
                f"loss {self.import_path!r} returned {type(outputs).__name__}: return headrace.trainer.loss.LossOutputs"
            )
        if not isinstance(outputs.loss, Tensor) or outputs.loss.ndim != 0:
            raise Failure(f"loss {self.import_path!r} returned a loss that is no scalar tensor: return a sum")
        if torch.is_grad_enabled() and not outputs.loss.requires_grad and outputs.loss != 0:
            file = getattr(sys.modules.get(self.import_path.partition(":")[0]), "__file__", None)
            raise Failure(
                f"loss {self.import_path!r}{f' ({file})' if file else ''} returned {float(outputs.loss):g} without a "
                "gradient, from which nothing can be learned: compute it from inputs.trainer_logprobs in torch alone; "
                "on the way from there to the sum must be no detach(), item(), numpy or torch.no_grad()"
            )
        if outputs.masked is not None and outputs.masked.shape != sequence.loss_mask.shape:
            raise Failure(
                f"loss {self.import_path!r} returned {tuple(outputs.masked.shape)} as `masked` for a sequence of "
                f"{len(sequence.loss_mask)} tokens: return one value per token, or leave it out"
            )
        for name in TAKEN_METRICS & outputs.metrics.keys():
            raise Failure(f"loss {self.import_path!r} reports {name!r}, which the step reports itself: rename it")


def _split(inputs: PackedInputs) -> Iterator[tuple[slice, LossInputs]]:
    """Each sequence that has members, alone, and where it is."""
    lengths = torch.unique_consecutive(inputs.sequences, return_counts=True)[1].tolist()
    places = (slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True))

    def parts(values: Tensor | None) -> Iterable[Any]:
        return repeat(None, len(lengths)) if values is None else torch.split(values, lengths)

    columns = [parts(getattr(inputs, column.name)) for column in fields(LossInputs)]
    sequences = (LossInputs(*values) for values in zip(*columns, strict=True))
    return (pair for pair in zip(places, sequences, strict=True) if pair[1].loss_mask.any())


def _masked_ratio_loss(inputs: LossInputs, credit: Tensor, masked: Tensor, kl_tau: float) -> LossOutputs:
    """-credit * rho where it is not masked, plus kl_tau * l**2 everywhere."""
    log_ratio = _log_ratio(inputs)
    per_token = -_credited_ratio(credit, log_ratio, ~masked)
    if kl_tau:
        per_token = per_token + kl_tau * log_ratio**2
    mismatch, members = _mismatch(log_ratio), inputs.loss_mask
    metrics = {
        "mismatch_kl": _mean(mismatch, members),
        "masked_mismatch_kl": _mean(mismatch, members & masked),
        "unmasked_mismatch_kl": _mean(mismatch, members & ~masked),
        "is_masked": _mean(masked, members),
    }
    return LossOutputs(_weighted_sum(per_token, inputs), metrics, masked)


def _clipped_ratio_loss(inputs: LossInputs, log_ratio: Tensor, eps_low: float, eps_high: float) -> LossOutputs:
    """-min(ratio * A, clip(ratio) * A). The clipped side, where it is the smaller, has no gradient."""
    advantages, ratio = _of_members(inputs.advantages, inputs), log_ratio.detach().exp()
    too_low = (advantages < 0) & (ratio < 1 - eps_low)
    too_high = (advantages > 0) & (ratio > 1 + eps_high)
    clipped = too_low | too_high
    bounded = (1 - eps_low) * advantages.where(too_low, 0.0) + (1 + eps_high) * advantages.where(too_high, 0.0)
    per_token = -(_credited_ratio(advantages, log_ratio, ~clipped) + bounded)
    metrics = {
        "mismatch_kl": _mismatch_kl(inputs),
        "is_clipped": _mean(clipped, inputs.loss_mask),
        "is_clipped_low": _mean(too_low, inputs.loss_mask),
        "is_clipped_high": _mean(too_high, inputs.loss_mask),
    }
    return LossOutputs(_weighted_sum(per_token, inputs), metrics, clipped)


def _credited_ratio(credit: Tensor, log_ratio: Tensor, keep: Tensor) -> Tensor:
    """credit * ratio where it is kept, else 0."""
    # A credit that is no finite number is kept, so that the step is skipped and said, rather than the token unnoticed.
    keep = (keep & (credit != 0)) | ~credit.isfinite()
    # Cut before the exponential: behind it an infinite ratio times a zero gradient would still be a NaN.
    return (credit * log_ratio.where(keep, 0.0).exp()).where(keep, 0.0)


def _log_ratio(inputs: LossInputs) -> Tensor:
    return _of_members(inputs.trainer_logprobs - inputs.inference_logprobs, inputs)


def _of_members(values: Tensor, inputs: LossInputs) -> Tensor:
    """0 elsewhere, early on, so that nothing that other tokens hold reaches the gradient."""
    return values.where(inputs.loss_mask, 0.0)


def _mean_of_sequence(values: Tensor, inputs: PackedInputs) -> Tensor:
    """For each token the mean over its sequence's members, where `values` is 0 outside them."""
    count = torch.zeros_like(values).index_add(0, inputs.sequences, inputs.loss_mask.to(values.dtype))
    total = torch.zeros_like(values).index_add(0, inputs.sequences, values)
    return (total / count.clamp(min=1)).index_select(0, inputs.sequences)


def _probability_difference(inputs: LossInputs) -> Tensor:
    return inputs.trainer_logprobs.detach().exp() - inputs.inference_logprobs.exp()


def _mismatch(log_ratio: Tensor) -> Tensor:
    """An estimate of the divergence between trainer and engine that is never negative."""
    return (log_ratio.exp() - log_ratio - 1).detach()


def _mismatch_kl(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    return _mean(_mismatch(_log_ratio(inputs)), inputs.loss_mask)


def _weighted_sum(per_token: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return _of_members(per_token, inputs).sum()


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return values.detach().where(mask, 0).sum(), mask.sum()
