"""The log-probability of each label, from hidden states, without ever holding the logits of all tokens.

Logits of `chunk` tokens exist at once; the backward pass computes them again. Written by hand because the softmax's
gradient is known in closed form: that is one matrix product less than checkpointing, and keeps no graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    chunk: int,
    *,
    fp32: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Per token the log-softmax of logits / temperature at the label, and the entropy, which has no gradient.

    `hidden` is [tokens, hidden], `weight` the output embedding [vocabulary, hidden]; the rest is [tokens]. Logits are
    products in the type of `hidden`, or with `fp32` in float32; either way the softmax is at least float32.
    """
    if fp32:
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _LabelLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight.to(hidden.dtype), labels, temperatures, chunk, compiled
        )
    return logprobs, entropy


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalizers, entropy = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        score = _compiled_score() if compiled else _score
        for part in _chunks(len(hidden), chunk):
            logprobs[part], normalizers[part], entropy[part] = score(
                hidden[part], weight, labels[part], temperatures[part].to(wide)
            )
        context.save_for_backward(hidden, weight, labels, temperatures, logprobs, normalizers)
        context.chunk, context.compiled = chunk, compiled
        context.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(context: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, logprobs, normalizers = context.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_logits_of = _compiled_grad_logits() if context.compiled else _grad_logits
        for part in _chunks(len(hidden), context.chunk):
            grad_logits = grad_logits_of(
                hidden[part],
                weight,
                labels[part],
                temperatures[part].to(grad.dtype),
                logprobs[part],
                normalizers[part],
                grad[part],
            )
            grad_hidden[part] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None, None


def _score(hidden: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax at the label, its normalizer, and the entropy."""
    logits = _logits(hidden, weight, temperatures)
    normalizers = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels[:, None])[:, 0]
    probabilities = (logits - normalizers[:, None]).exp_()
    return chosen - normalizers, normalizers, normalizers - torch.linalg.vecdot(probabilities, logits)


def _grad_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    logprobs: Tensor,
    normalizers: Tensor,
    grad: Tensor,
) -> Tensor:
    """d logprob / d logit = (label - softmax) / temperature, where label is 1 at the label and 0 elsewhere."""
    scale = (grad / temperatures)[:, None]
    logits = _logits(hidden, weight, temperatures)
    grad_logits = logits.sub_(normalizers[:, None]).exp_().mul_(-scale).to(weight.dtype)
    at_label = scale * -torch.expm1(logprobs)[:, None]
    return grad_logits.scatter_(-1, labels[:, None], at_label.to(weight.dtype))


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return (hidden @ weight.t()).to(temperatures.dtype).div_(temperatures[:, None])


@cache
def _compiled_score() -> Any:
    return torch.compile(_score)


@cache
def _compiled_grad_logits() -> Any:
    return torch.compile(_grad_logits)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
