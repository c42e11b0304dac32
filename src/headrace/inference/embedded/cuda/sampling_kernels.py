"""Triton kernels for sampling: the same as `sampling.sample`, for rows without truncation.

One pass over the logits computes the maximum and the sum of each tile of the vocabulary; a second finds the tile in
which the cumulative distribution passes the row's uniform number, and the token in that tile. The same uniform number
gives the same token as `sampling.sample`, up to rounding, and nothing of the vocabulary's size is written.
"""

# ruff: noqa: N803 (constants of a kernel are capitals)
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


class TileStats(NamedTuple):
    """Results of the first pass: [row, tile] each."""

    tops: Tensor
    sums: Tensor
    places: Tensor
    """Index of the maximum within its tile."""

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device, tile: int = TILE) -> TileStats:
        shape, types = (rows, triton.cdiv(vocab, tile)), (torch.float32, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in types))


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    chosen: Tensor,
    tiles: TileStats,
    *,
    tile: int = TILE,
    warps: int = 8,
) -> None:
    """Write each row's token and its logprob over the whole vocabulary to `chosen`, [2, rows] in float64.

    A temperature of 0 takes the most likely token, with its logprob at temperature 1. `tiles` has enough rows.
    """
    rows, vocab = logits.shape
    count = triton.cdiv(vocab, tile)
    assert logits.stride(1) == chosen.stride(1) == 1 and tiles.tops.shape[1] == count
    _reduce_tiles[(count, rows)](
        logits, temperatures, *tiles, logits.stride(0), VOCAB=vocab, TILES=count, TILE=tile, num_warps=warps
    )
    _choose_token[(rows,)](
        logits,
        temperatures,
        uniforms,
        *tiles,
        chosen,
        logits.stride(0),
        chosen.stride(0),
        VOCAB=vocab,
        TILES=count,
        PADDED=triton.next_power_of_2(count),
        TILE=tile,
        num_warps=warps,
    )


def mask_tokens(logits: Tensor, is_masked: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in the rows that are masked.

    `masks`: [row, vocabulary / 32] int32; the lowest bit is the first token's.
    """
    rows, vocab = logits.shape
    grid = triton.cdiv(vocab, TILE), rows
    _mask_tokens[grid](logits, is_masked, masks, logits.stride(0), masks.stride(0), VOCAB=vocab, TILE=TILE)


def feed_tokens(ids: Tensor, sources: Tensor, chosen: Tensor) -> None:
    """Set each id whose source is not negative to the token that `sample_tokens` chose for the row `source`."""
    width = triton.next_power_of_2(len(sources))
    _feed_tokens[(1,)](ids, sources, chosen, len(sources), WIDTH=width, num_warps=4)


@triton.jit
def _feed_tokens(ids, sources, chosen, count, WIDTH: tl.constexpr):
    row = tl.arange(0, WIDTH)
    source = tl.load(sources + row, mask=row < count, other=-1)
    token = tl.load(chosen + source, mask=source >= 0, other=0.0)
    tl.store(ids + row, token.to(tl.int64), mask=source >= 0)


@triton.jit
def _mask_tokens(logits, is_masked, masks, row_stride, mask_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(1)
    if tl.load(is_masked + row) != 0:
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        words = tl.load(masks + row.to(tl.int64) * mask_stride + column // 32, mask=column < VOCAB, other=-1)
        is_refused = ((words >> (column % 32)) & 1) == 0
        tl.store(logits + row.to(tl.int64) * row_stride + column, float("-inf"), mask=is_refused)


@triton.jit
def _reduce_tiles(
    logits, temperatures, tops, sums, places, row_stride, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):
    tile = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    column = tile * TILE + tl.arange(0, TILE)
    scores = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=column < VOCAB, other=float("-inf"))
    scores = scores.to(tl.float32) / temperature
    numbers = tl.where(scores == scores, scores, float("-inf"))
    top = tl.max(numbers, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    where = row * TILES + tile
    tl.store(tops + where, top)
    tl.store(sums + where, tl.sum(tl.exp(scores - base), 0))  # NaN if any score is NaN
    tl.store(places + where, tl.argmax(numbers, 0).to(tl.int32))


@triton.jit
def _choose_token(
    logits,
    temperatures,
    uniforms,
    tops,
    sums,
    places,
    chosen,
    row_stride,
    chosen_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    temperature = tl.where(is_greedy, 1.0, temperature)
    number = tl.arange(0, PADDED)
    is_tile = number < TILES
    top = tl.load(tops + row * TILES + number, mask=is_tile, other=float("-inf"))
    mass = tl.load(sums + row * TILES + number, mask=is_tile, other=0.0)
    best = tl.max(top, 0)
    mass = tl.where(mass == 0.0, 0.0, mass * tl.exp(top - best)).to(tl.float64)
    total = tl.sum(mass, 0)
    target = tl.load(uniforms + row) * total
    # The tile in which the sum passes the target, and never one without any mass.
    tile = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    tile = tl.minimum(tile, tl.max(tl.where(mass > 0.0, number, 0), 0))
    target -= tl.sum(tl.where(number < tile, mass, 0.0), 0)
    place = tl.arange(0, TILE)
    own = logits + row.to(tl.int64) * row_stride
    scores = tl.load(own + tile * TILE + place, mask=tile * TILE + place < VOCAB, other=float("-inf"))
    probs = tl.exp(scores.to(tl.float32) / temperature - best)
    within = tl.sum((tl.cumsum(probs.to(tl.float64), 0) <= target).to(tl.int32), 0)
    within = tl.minimum(within, tl.max(tl.where(probs > 0.0, place, 0), 0))
    likeliest = tl.argmax(top, 0).to(tl.int32)
    likeliest_place = tl.load(places + row * TILES + likeliest)
    token = tl.where(is_greedy, likeliest * TILE + likeliest_place, tile * TILE + within)
    score = tl.load(own + token).to(tl.float32) / temperature
    logprob = score.to(tl.float64) - best.to(tl.float64) - tl.log(total)
    tl.store(chosen + row, token.to(tl.float64))
    tl.store(chosen + chosen_stride + row, logprob)
