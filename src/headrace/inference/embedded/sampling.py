"""Sampling: pure functions over a batch of logits.

Each request has one uniform number per token, from its own generator or the engine's, and the token is found by
inverting the cumulative distribution. So a seeded request samples the same tokens in any batch (up to rounding of
matrix products of another size), and a token costs one random number instead of one per vocabulary entry.

Tensors are [requests, vocabulary], or [requests] with one value per row.
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
"""Vocabulary entries per tile: sampling chooses a tile first, then a token in it."""


class Sampled(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    """At the row's temperature, over the whole vocabulary."""
    log_mass: Tensor | None
    """Log of the probability left by truncation; None if no row truncates."""


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Sampled:
    """Sample one token per row; temperature 0 takes the most likely token, with its logprob at temperature 1."""
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
    # The logarithm of one probability per row: on a CPU log_softmax would cost as much as the softmax again.
    return Sampled(tokens, probs.gather(-1, tokens[:, None])[:, 0].log(), log_mass)


def scaled_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return log_softmax(logits / temperature) in float32, one temperature per row; 0 counts as 1."""
    return torch.log_softmax(_scaled(logits, temperatures), -1)


def _scaled(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(value in (0, 1) for value in temperatures):
        return logits.float()
    return logits.float() / torch.tensor([value or 1.0 for value in temperatures], device=logits.device)[:, None]


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert each row's cumulative distribution, first over tiles of the vocabulary and then inside one tile.

    Sums over tiles are float64: the tail of a large vocabulary would be rounded away in float32.
    """
    count, vocab = probs.shape
    tiles = F.pad(probs, (0, -vocab % TILE)).view(count, -1, TILE)
    cumulative = tiles.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    tile = torch.searchsorted(cumulative, targets, right=True).clamp_(max=tiles.shape[1] - 1)
    mass = cumulative.gather(1, tile)
    before = torch.where(tile > 0, cumulative.gather(1, (tile - 1).clamp_(min=0)), 0.0)
    # Below 1, so that no token after the last possible one is chosen.
    share = ((targets - before) / (mass - before)).clamp_(max=1 - 2**-52)
    inside = tiles[torch.arange(count, device=probs.device), tile[:, 0]].cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(inside, share * inside[:, -1:], right=True).clamp_(max=TILE - 1)
    return (tile * TILE + place)[:, 0].clamp_(max=vocab - 1)


def truncate(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero the probabilities below min_p times the largest, outside the top_k, and outside the smallest set with top_p
    of the rest."""
    vocab, device = probs.shape[-1], probs.device
    ranks = torch.arange(vocab, device=device)
    least = torch.tensor([entry.min_p for entry in params], device=device)[:, None]
    most = torch.tensor([entry.top_k if entry.top_k > 0 else vocab for entry in params], device=device)[:, None]
    mass = torch.tensor([entry.top_p for entry in params], dtype=torch.float64, device=device)[:, None]
    ordered, order = probs.sort(stable=True, dim=-1, descending=True)
    ordered = ordered.masked_fill((ranks >= most) | (ordered < least * ordered[:, :1]), 0.0)
    share = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
    before = share.cumsum(-1) - share  # 0 for the most likely token, which is always kept
    ordered = ordered.masked_fill(before >= mass, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)


def top_tokens(logprobs: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """Return the `counts[row]` most likely tokens of each row with their logprobs."""
    most = min(max(counts), logprobs.shape[-1])
    values, tokens = logprobs.topk(most, -1)
    pairs = zip(tokens.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(ids[:count], scores[:count], strict=True)) for ids, scores, count in pairs]
