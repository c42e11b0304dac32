"""The log-probability of each label, from hidden states, without ever holding the logits of all tokens.

Logits of `chunk` tokens exist at once; the backward pass computes them again. Written by hand because the softmax's
gradient is known in closed form: that is one matrix product less than checkpointing, and keeps no graph.
"""

from __future__ import annotations

from typing import Any

import torch


def label_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token the log-softmax of logits / temperature at the label, and the entropy, which has no gradient.

    `hidden` is [tokens, hidden], `weight` the output embedding [vocabulary, hidden]; the rest is [tokens].
    """
    logprobs, entropy = _LabelLogprobs.apply(hidden, weight.to(hidden.dtype), labels, temperatures, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        chosen, normalizers, entropy = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], weight, temperatures[part], wide)
            normalizers[part] = logits.logsumexp(-1)
            chosen[part] = logits.gather(-1, labels[part, None])[:, 0]
            probabilities = (logits - normalizers[part, None]).exp_()
            entropy[part] = normalizers[part] - torch.linalg.vecdot(probabilities, logits)
        context.save_for_backward(hidden, weight, labels, temperatures, normalizers)
        context.chunk = chunk
        context.mark_non_differentiable(entropy)
        return chosen - normalizers, entropy

    @staticmethod
    def backward(context: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d logprob / d logit = (label - softmax) / temperature."""
        hidden, weight, labels, temperatures, normalizers = context.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part in _chunks(len(hidden), context.chunk):
            logits = _logits(hidden[part], weight, temperatures[part], normalizers.dtype)
            scale = grad[part, None] / temperatures[part, None].to(normalizers.dtype)
            grad_logits = logits.sub_(normalizers[part, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(-1, labels[part, None], scale)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (hidden @ weight.t()).to(dtype).div_(temperatures[:, None].to(dtype))


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
