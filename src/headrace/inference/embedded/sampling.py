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
import torch.nn.functional as F
from torch import Tensor

from headrace.inference.backend import TopLogprobs
from headrace.inference.schema import SamplingParams

TILE = 256
"""Entries of the vocabulary whose probabilities are added up first, to find a token among few."""


class Sampled(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    """At the row's temperature, over the whole vocabulary."""
    log_mass: Tensor | None
    """Log of the probability that was left to choose from; None if no row truncates."""


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Sampled:
    """One token per row. Temperature 0 takes the most likely token and reports its logprob at temperature 1."""
    greedy = [entry.temperature == 0 for entry in params]
    probs = torch.softmax(_scaled(logits, [entry.temperature for entry in params]), -1)
    log_mass = None
    if all(greedy):
        tokens = logits.argmax(-1)
    else:
        allowed = probs
        cut = [row for row, entry in enumerate(params) if entry.truncates]
        if cut:
            allowed = probs.clone()
            allowed[cut] = truncate(probs[cut], [params[row] for row in cut])
            log_mass = allowed.sum(-1, dtype=torch.float64).log()
        tokens = draw(allowed, uniforms)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
    # The logarithm of one probability per row: on a CPU those of all would cost as much as the softmax again.
    return Sampled(tokens, probs.gather(-1, tokens[:, None])[:, 0].log(), log_mass)


def scaled_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log-softmax(logits / temperature) in float32, one temperature per row; 0 counts as 1."""
    return torch.log_softmax(_scaled(logits, temperatures), -1)


def _scaled(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(value in (0, 1) for value in temperatures):
        return logits.float()
    return logits.float() / torch.tensor([value or 1.0 for value in temperatures], device=logits.device)[:, None]


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert each row's cumulative distribution, first over tiles of the vocabulary and then inside of one.

    Sums over several tiles are in float64: a large vocabulary's tail would round away in less.
    """
    count, vocab = probs.shape
    tiles = F.pad(probs, (0, -vocab % TILE)).view(count, -1, TILE)
    cumulative = tiles.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    tile = torch.searchsorted(cumulative, targets, right=True).clamp_(max=tiles.shape[1] - 1)
    mass = cumulative.gather(1, tile)
    before = torch.where(tile > 0, cumulative.gather(1, (tile - 1).clamp_(min=0)), 0.0)
    share = ((targets - before) / (mass - before)).clamp_(
        max=1 - 2**-52
    )  # below 1: never past the last that is possible
    inside = tiles[torch.arange(count, device=probs.device), tile[:, 0]].cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(inside, share * inside[:, -1:], right=True).clamp_(max=TILE - 1)
    return (tile * TILE + place)[:, 0].clamp_(max=vocab - 1)


def truncate(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what is less likely than min_p of the likeliest, then outside the k likeliest, then outside the smallest set
    that holds top_p of the rest."""
    vocab, device = probs.shape[-1], probs.device
    ranks = torch.arange(vocab, device=device)
    least = torch.tensor([entry.min_p for entry in params], device=device)[:, None]
    most = torch.tensor([entry.top_k if entry.top_k > 0 else vocab for entry in params], device=device)[:, None]
    mass = torch.tensor([entry.top_p for entry in params], dtype=torch.float64, device=device)[:, None]
    ordered, order = probs.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.masked_fill((ranks >= most) | (ordered < least * ordered[:, :1]), 0.0)
    share = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
    before = share.cumsum(-1) - share  # the most likely token has nothing before it: it always stays
    ordered = ordered.masked_fill(before >= mass, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)


def likeliest(logprobs: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """As many of the most likely tokens of each row as its count says."""
    most = min(max(counts), logprobs.shape[-1])
    values, tokens = logprobs.topk(most, -1)
    pairs = zip(tokens.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(ids[:count], scores[:count], strict=True)) for ids, scores, count in pairs]
