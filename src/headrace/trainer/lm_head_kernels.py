"""The head's two passes over a chunk of logits, for a GPU: each reads every logit once.

The matrix products before and after them are cuBLAS's: a fused kernel that never writes the logits would lose more in
the product than these passes take. Imported only where there is a GPU, since torch's CUDA builds include triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a token that are processed at once."""
WARPS = 8


def score(logits: Tensor, labels: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-softmax at the label, its normalizer, and the entropy, in float32."""
    logprobs, normalizers, entropy = (torch.empty_like(temperatures) for _ in range(3))
    tokens, vocabulary = logits.shape
    if tokens:
        inputs, outputs = (logits, labels, temperatures), (logprobs, normalizers, entropy)
        _score[(tokens,)](*inputs, *outputs, logits.stride(0), vocabulary, block=BLOCK, num_warps=WARPS)
    return logprobs, normalizers, entropy


def gradient(
    logits: Tensor, labels: Tensor, temperatures: Tensor, logprobs: Tensor, normalizers: Tensor, grad: Tensor
) -> Tensor:
    """Overwrite the logits with their gradient; return it."""
    scale = grad / temperatures
    tokens, vocabulary = logits.shape
    if tokens:
        at_label = scale * -torch.expm1(logprobs)  # 1 - p of a nearly certain label is not lost to rounding
        inputs = (logits, labels, temperatures, normalizers, scale, at_label)
        _gradient[(tokens,)](*inputs, logits.stride(0), vocabulary, block=BLOCK, num_warps=WARPS)
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _score(logits, labels, temperatures, logprobs, normalizers, entropy, stride, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Score one token: sums of exp(x - largest), and of that times x - largest, both corrected as the largest grows."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    inverse = 1.0 / tl.load(temperatures + token)
    largest = tl.full([], -1e30, tl.float32)  # and not -inf: the correction multiplies a sum of zero with it
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for first in range(0, vocabulary, block):
        places = first + tl.arange(0, block)
        inside = places < vocabulary
        values = tl.load(row + places, mask=inside, other=-float("inf")).to(tl.float32) * inverse
        higher = tl.maximum(largest, tl.max(values, axis=0))
        growth = largest - higher
        distance = tl.where(inside, values - higher, 0.0)
        powers = tl.where(inside, tl.exp(distance), 0.0)
        decay = tl.exp(growth)
        weighted = (weighted + total * growth) * decay + powers * distance
        total = total * decay + powers
        largest = higher
    sum_of_powers = tl.sum(total, axis=0)
    log_of_sum = tl.log(sum_of_powers)
    chosen = tl.load(row + tl.load(labels + token)).to(tl.float32) * inverse
    tl.store(logprobs + token, (chosen - largest) - log_of_sum)
    tl.store(normalizers + token, largest + log_of_sum)
    tl.store(entropy + token, log_of_sum - tl.sum(weighted, axis=0) / sum_of_powers)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(logits, labels, temperatures, normalizers, scales, at_labels, stride, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Overwrite the logits of one token with -scale * softmax, and with `at_label` at the label."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    inverse = 1.0 / tl.load(temperatures + token)
    normalizer = tl.load(normalizers + token)
    scale = tl.load(scales + token)
    label = tl.load(labels + token)
    at_label = tl.load(at_labels + token)
    for first in range(0, vocabulary, block):
        places = first + tl.arange(0, block)
        inside = places < vocabulary
        values = tl.load(row + places, mask=inside, other=0.0).to(tl.float32) * inverse
        changes = tl.where(places == label, at_label, -scale * tl.exp(values - normalizer))
        tl.store(row + places, changes.to(logits.dtype.element_ty), mask=inside)
