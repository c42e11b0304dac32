"""Choosing tokens: pure functions over a batch of logits.

Every request brings one uniform number per token, drawn from its own generator or the engine's, and the token is read
off the cumulative distribution. So a seeded request samples the same whatever else is in the batch (up to the rounding
of a matrix product of another size), and a token costs one number instead of one per vocabulary entry.

Tensors are [requests, vocabulary] or, where a row has one value, [requests].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.inference.schema import SamplingParams


class Sampled(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    """At the row's temperature, over the whole vocabulary."""
    log_mass: Tensor | None
    """Log of the probability that top-k and top-p left to choose from; None if no row truncates."""


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Sampled:
    """One token per row. Temperature 0 takes the most likely token and reports its logprob at temperature 1."""
    greedy = [entry.temperature == 0 for entry in params]
    logprobs = scaled_logprobs(logits, [entry.temperature for entry in params])
    log_mass = None
    if all(greedy):
        tokens = logits.argmax(-1)
    else:
        probs = logprobs.exp()
        cut = [row for row, entry in enumerate(params) if entry.truncates]
        if cut:
            probs[cut] = truncate(probs[cut], [params[i].top_k for i in cut], [params[i].top_p for i in cut])
            log_mass = probs.sum(-1, dtype=torch.float64).log()
        tokens = draw(probs, uniforms)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
    return Sampled(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], log_mass)


def scaled_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log-softmax(logits / temperature) in float32, one temperature per leading index; 0 counts as 1."""
    divisor = torch.tensor([value or 1.0 for value in temperatures], device=logits.device)
    return torch.log_softmax(logits.float() / divisor.view(-1, *[1] * (logits.dim() - 1)), -1)


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert each row's cumulative distribution. In float64: a large vocabulary's tail would round away in less."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=probs.device) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1)


def truncate(probs: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Zero what lies outside the k most likely tokens, then outside the smallest set that holds top_p of the rest."""
    vocab = probs.shape[-1]
    ranks = torch.arange(vocab, device=probs.device)
    most = torch.tensor([vocab if k == -1 else k for k in top_k], device=probs.device)[:, None]
    mass = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    ordered, order = probs.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.masked_fill(ranks >= most, 0.0)
    share = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
    before = share.cumsum(-1) - share  # the most likely token has nothing before it: it always stays
    ordered = ordered.masked_fill(before >= mass, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)
