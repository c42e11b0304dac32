"""Triton kernels for the paged KV cache: storing of new keys and values, decode and prefill attention.

The query heads that share a key head are the rows of one small matrix product, so that every key is read once. Decode
is split into items, ranges of one request's keys (see `rows`), as in flash-decoding; the program that computes the last
item of a request combines them, since a second kernel would cost a launch in every layer. Prefill is split into tiles
of consecutive tokens. All sizes that vary are read on the device, so that a CUDA graph can be replayed with other
requests. Storage is [slot, head, dimension]: a head's row of a slot is 256 bytes in the usual models, which suits the
memory controller, and a slot is written as a whole.

Softmax is computed in powers of two, as the hardware does.
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

from headrace.inference.embedded.block_manager import BLOCK_SIZE

LOG2E = 1.4426950408889634
MIN_MATRIX_SIZE = 16
"""Fewest rows and columns of a matrix product."""


class Launch(NamedTuple):
    """Launch parameters of the attention kernel."""

    tile: int = 64
    """Keys per iteration."""
    warps: int = 4
    stages: int = 2

    @classmethod
    def for_keys_of(cls, size: int) -> Launch:
        """Return the fastest ones for keys of so many bytes, by `benchmarks.inference.gpu_engine kernels`."""
        return cls(warps=2, stages=3) if size <= MAX_NARROW_KEY_BYTES else cls()


MAX_NARROW_KEY_BYTES = 128
"""A tile of such keys is too little work for four warps."""
PREFILL_ROWS = 64
"""Rows of the matrix product of a prefill tile: its tokens, times the query heads of a key head."""

MAX_WIDE_TILE_BYTES = 512
"""Bytes of a key up to which two stages of 64 keys and values fit into shared memory."""


def prefill_tile_tokens(heads: int, key_heads: int) -> int:
    """Return the tokens of a prefill tile."""
    return max(1, PREFILL_ROWS // (heads // key_heads))


def store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write [token, head, dimension] to the slots; tokens with a negative slot are not stored."""
    tokens, heads, dim = keys.shape
    width = heads * dim
    tensors, strides = (keys, values, key_cache, value_cache, slots), (*keys.stride()[:2], *values.stride()[:2])
    padded = triton.next_power_of_2(width)
    _store[(tokens,)](*tensors, *strides, WIDTH=width, DIM=dim, PADDED=padded, num_warps=4)


@triton.jit
def _store(
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        place = tl.arange(0, PADDED)
        inside = place < WIDTH
        head, dim = place // DIM, place % DIM
        key = tl.load(keys + token * key_token + head * key_head + dim, mask=inside)
        value = tl.load(values + token * value_token + head * value_head + dim, mask=inside)
        tl.store(key_cache + slot * WIDTH + place, key, mask=inside)
        tl.store(value_cache + slot * WIDTH + place, value, mask=inside)


class PartialResults(NamedTuple):
    """Results of items that are combined, float32."""

    sums: Tensor
    """[item, query head, dimension]."""
    stats: Tensor
    """[item, query head, 2]: the largest score, in powers of two, and the sum of weights."""
    finished: Tensor
    """[item, query head]: by a request's first item and a key head, how many items are computed; 0 between steps."""

    @classmethod
    def allocate(cls, items: int, heads: int, dim: int, device: torch.device) -> PartialResults:
        sums, stats = (torch.empty(items, heads, each, dtype=torch.float32, device=device) for each in (dim, 2))
        return cls(sums, stats, torch.zeros(items, heads, dtype=torch.int32, device=device))


def decode_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    items: Tensor,
    partial: PartialResults,
    output: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    launch: Launch | None = None,
) -> None:
    """Write the attention of each request's last token to `output`, [request, query head, dimension].

    `items` are [item, 5]: request, first key, the key after the last, the request's first item, and how many it has.
    Items with a negative request are skipped. `window` and `softcap` are off at 0.
    """
    heads, dim = queries.shape[1:]
    shared_by = heads // key_cache.shape[1]
    launch = launch or Launch.for_keys_of(dim * key_cache.itemsize)
    _attend[(key_cache.shape[1], len(items))](
        queries,
        key_cache,
        value_cache,
        tables,
        lengths,
        items,
        *partial,
        output,
        scaling if softcap else scaling * LOG2E,
        softcap,
        queries.stride(0),
        queries.stride(1),
        tables.stride(0),
        HEADS=key_cache.shape[1],
        GROUP=shared_by,
        DIM=dim,
        GROUP_PADDED=max(MIN_MATRIX_SIZE, triton.next_power_of_2(shared_by)),
        DIM_PADDED=max(MIN_MATRIX_SIZE, triton.next_power_of_2(dim)),
        TILE=launch.tile,
        BLOCK_SIZE=BLOCK_SIZE,
        WINDOW=window,
        CAPPED=softcap > 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


@triton.jit
def _attend(
    queries,
    key_cache,
    value_cache,
    tables,
    lengths,
    items,
    sums,
    stats,
    finished,
    output,
    scaling,
    softcap,
    query_token,
    query_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items + item * 5)
    if row >= 0:
        start = tl.load(items + item * 5 + 1)
        end = tl.load(items + item * 5 + 2)
        first = tl.load(items + item * 5 + 3)
        count = tl.load(items + item * 5 + 4)
        if WINDOW > 0:
            start = tl.maximum(start, tl.load(lengths + row) - WINDOW)
        group = tl.arange(0, GROUP_PADDED)
        dim = tl.arange(0, DIM_PADDED)
        own = (group[:, None] < GROUP) & (dim[None, :] < DIM)
        query_heads = head * GROUP + group
        query = tl.load(
            queries + row.to(tl.int64) * query_token + query_heads[:, None] * query_head + dim[None, :],
            mask=own,
            other=0.0,
        )
        best = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
        mixed = tl.zeros([GROUP_PADDED, DIM_PADDED], dtype=tl.float32)
        table = tables + row.to(tl.int64) * table_row
        for begin in range(start, end, TILE):
            token = begin + tl.arange(0, TILE)
            inside = token < end
            block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + token % BLOCK_SIZE
            place = (slot * HEADS + head)[:, None] * DIM + dim[None, :]
            readable = inside[:, None] & (dim[None, :] < DIM)
            key = tl.load(key_cache + place, mask=readable, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
            if CAPPED:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0)) * 1.4426950408889634
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fading = tl.exp2(best - higher)
            total = total * fading + tl.sum(weights, 1)
            value = tl.load(value_cache + place, mask=readable, other=0.0)
            mixed = mixed * fading[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            best = higher
        place = (row.to(tl.int64) * (HEADS * GROUP) + query_heads)[:, None] * DIM + dim[None, :]
        if count == 1:
            attended = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # of a row without keys: 0
            tl.store(output + place, attended.to(output.dtype.element_ty), mask=own)
        else:
            part = item * (HEADS * GROUP) + query_heads
            tl.store(sums + part[:, None] * DIM + dim[None, :], mixed, mask=own)
            tl.store(stats + part * 2, best, mask=group < GROUP)
            tl.store(stats + part * 2 + 1, total, mask=group < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them counts the item
            counter = finished + first * (HEADS * GROUP) + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter, 0)
                combined = _combine(
                    *(sums, stats, first, count, query_heads, group < GROUP, own),
                    *(HEADS * GROUP, DIM, GROUP_PADDED, DIM_PADDED),
                )
                tl.store(output + place, combined.to(output.dtype.element_ty), mask=own)


@triton.jit
def _combine(
    sums,
    stats,
    first,
    count,
    query_heads,
    is_query,
    own,
    ALL_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Return the attention of a request with several items."""
    dim = tl.arange(0, DIM_PADDED)
    best = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    mixed = tl.zeros([GROUP_PADDED, DIM_PADDED], dtype=tl.float32)
    for item in range(first, first + count):
        part = item * ALL_HEADS + query_heads
        top = tl.load(stats + part * 2, mask=is_query, other=float("-inf"))
        weight = tl.load(stats + part * 2 + 1, mask=is_query, other=0.0)
        own_sums = tl.load(sums + part[:, None] * DIM + dim[None, :], mask=own, other=0.0)
        higher = tl.maximum(best, top)
        # Both may be minus infinity for keys before a sliding window, which add nothing.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading, share = tl.exp2(best - base), tl.exp2(top - base)
        total = total * fading + weight * share
        mixed = mixed * fading[:, None] + own_sums * share[:, None]
        best = higher
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


def prefill_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    tiles: Tensor,
    output: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Write the attention of chunks of several tokens to `output`, [token, query head, dimension].

    `tiles` are [tile, 5]: request, first token of the tile within its chunk, tokens of the chunk, position of the
    chunk's first token, and row of that token. The chunk's last token is in the row of its request, and the others are
    in consecutive rows. Tiles with a negative request are skipped.
    """
    heads, dim = queries.shape[1:]
    shared_by = heads // key_cache.shape[1]
    tokens = prefill_tile_tokens(heads, key_cache.shape[1])
    padded = max(MIN_MATRIX_SIZE, triton.next_power_of_2(dim))
    _attend_tile[(key_cache.shape[1], len(tiles))](
        queries,
        key_cache,
        value_cache,
        tables,
        tiles,
        output,
        scaling if softcap else scaling * LOG2E,
        softcap,
        queries.stride(0),
        queries.stride(1),
        tables.stride(0),
        HEADS=key_cache.shape[1],
        GROUP=shared_by,
        TOKENS=tokens,
        ROWS=max(MIN_MATRIX_SIZE, triton.next_power_of_2(tokens * shared_by)),
        DIM=dim,
        DIM_PADDED=padded,
        TILE=64 if padded * key_cache.itemsize <= MAX_WIDE_TILE_BYTES else 32,
        BLOCK_SIZE=BLOCK_SIZE,
        WINDOW=window,
        CAPPED=softcap > 0,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _attend_tile(
    queries,
    key_cache,
    value_cache,
    tables,
    tiles,
    output,
    scaling,
    softcap,
    query_token,
    query_head,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(tiles + tile * 5)
    if request >= 0:
        first = tl.load(tiles + tile * 5 + 1)
        count = tl.load(tiles + tile * 5 + 2)
        start = tl.load(tiles + tile * 5 + 3)
        first_row = tl.load(tiles + tile * 5 + 4)
        lane = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PADDED)
        token = first + lane // GROUP
        is_query = (lane < TOKENS * GROUP) & (token < count)
        row = tl.where(token == count - 1, request, first_row + token).to(tl.int64)
        query_heads = head * GROUP + lane % GROUP
        own = is_query[:, None] & (dim[None, :] < DIM)
        query = tl.load(
            queries + row[:, None] * query_token + query_heads[:, None] * query_head + dim[None, :], mask=own, other=0.0
        )
        position = start + token
        end = start + tl.minimum(first + TOKENS, count)
        begin_key = 0
        if WINDOW > 0:
            begin_key = tl.maximum(0, start + first + 1 - WINDOW)
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
        table = tables + request.to(tl.int64) * table_row
        for begin in range(begin_key, end, TILE):
            key_position = begin + tl.arange(0, TILE)
            inside = key_position < end
            block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + key_position % BLOCK_SIZE
            place = (slot * HEADS + head)[:, None] * DIM + dim[None, :]
            readable = inside[:, None] & (dim[None, :] < DIM)
            key = tl.load(key_cache + place, mask=readable, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
            if CAPPED:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0)) * 1.4426950408889634
            visible = inside[None, :] & (key_position[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            # A row may not see any key so far, if the window of the tile's first token ends before its own begins.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            fading = tl.exp2(best - base)
            total = total * fading + tl.sum(weights, 1)
            value = tl.load(value_cache + place, mask=readable, other=0.0)
            mixed = mixed * fading[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            best = higher
        attended = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (row * (HEADS * GROUP) + query_heads)[:, None] * DIM + dim[None, :]
        tl.store(output + place, attended.to(output.dtype.element_ty), mask=own)
