"""The chunks of a step as tensors: one row of tokens for the whole batch, and the groups in which they attend.

All tokens of a step go through the model in one row, without padding; only attention separates requests. Chunks of
similar shape form an `AttentionGroup`: padded to the same size, with keys gathered from their blocks or contiguous in a
`KVWindow`. Tokens are in the order of the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.block_manager import BLOCK_SIZE, PADDING_BLOCK, blocks_for
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Chunk

MAX_PADDING_RATIO = 1.25
"""Keys that a group may read per key that it needs; beyond that, longer requests form another group."""
FREE_PADDING_KEYS = 2048
"""Padding that costs less than another group."""
MAX_SINGLE_CHUNK = 128
"""Longest chunk, in tokens, whose tokens attend one by one."""
MIN_ROW_TOKENS = 128
"""Length of the rows in the first bucket."""
ROW_INCREMENT = 8
"""Rows by which a bucket grows."""


class RowFill(NamedTuple):
    """A row that must be filled from its request's blocks."""

    row: int
    request: Request


class WindowBucket:
    """Rows of `length` tokens, used without gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = 0
        """Allocated rows; the bucket is dropped once it is empty."""
        self.requests: list[Request] = []
        """By row."""
        self.copies: list[tuple[int, int]] = []
        """(from, to): rows that must be copied before any is filled."""
        self.fills: list[RowFill] = []


class KVWindow:
    """Row assignment of a second, contiguous copy of the keys and values of decoding requests, on a CPU.

    Attention on a CPU reads contiguous rows in place; out of blocks it would copy every key at every step. Rows are in
    buckets of one length each, so that requests of similar length attend together; a request that outgrows its bucket
    moves to one twice as long. A row is filled from its request's blocks once, when the request begins to decode, and
    then grows by one token per step; a request without a row reads its blocks. All rows have at most `budget` tokens.
    Copies and fills are due after `arrange`; `kv_cache` has the rows.
    """

    def __init__(self, budget: int) -> None:
        self.buckets: dict[int, WindowBucket] = {}
        self._budget = budget
        self._resets: dict[Request, int] = {}
        """Each request's `resets` when its row was filled: after a reset the row is out of date."""

    def arrange(self, requests: Iterable[Request]) -> list[WindowBucket]:
        """Give rows to these requests only, within the budget, and return the buckets in use."""
        wanted = dict.fromkeys(requests)
        for bucket in self.buckets.values():
            self._evict(bucket, wanted)
        for request in wanted:
            if request not in self._resets:
                self._assign_row(request)
        self.buckets = {length: bucket for length, bucket in self.buckets.items() if bucket.requests}
        return list(self.buckets.values())

    def _assign_row(self, request: Request) -> None:
        """Give a request a row in the bucket for its length, if the budget allows that."""
        length = max(MIN_ROW_TOKENS, 1 << (len(request.tokens) - 1).bit_length())
        bucket = self.buckets.get(length) or WindowBucket(length)
        if len(bucket.requests) == bucket.rows:
            used = sum(other.rows * other.length for other in self.buckets.values())
            if used + ROW_INCREMENT * length > self._budget:
                return
            bucket.rows += ROW_INCREMENT
        self.buckets[length] = bucket
        bucket.fills.append(RowFill(len(bucket.requests), request))
        bucket.requests.append(request)
        self._resets[request] = request.resets

    def _evict(self, bucket: WindowBucket, wanted: dict[Request, None]) -> None:
        """Remove requests that are not wanted, out of date or too long; the last rows fill the gaps."""
        bucket.copies, bucket.fills = [], []
        leaving = {
            row
            for row, request in enumerate(bucket.requests)
            if request not in wanted or self._resets[request] != request.resets or len(request.tokens) > bucket.length
        }
        if not leaving:
            return
        for row in leaving:
            del self._resets[bucket.requests[row]]
        count = len(bucket.requests) - len(leaving)
        gaps = [row for row in sorted(leaving) if row < count]
        movers = [row for row in range(count, len(bucket.requests)) if row not in leaving]
        bucket.copies = list(zip(movers, gaps, strict=True))
        for source, target in bucket.copies:
            bucket.requests[target] = bucket.requests[source]
        del bucket.requests[count:]


@dataclass
class AttentionGroup:
    """`count` chunks that attend together, each padded to `width` queries and `keys` keys.

    Their tokens are [begin, end) of the batch.
    """

    begin: int
    end: int
    count: int
    width: int
    keys: int
    positions: Tensor
    """[count, width] of the queries."""
    dtype: torch.dtype
    blocks: Tensor | None = None
    """[count, keys / BLOCK_SIZE] of the cache; None if the keys are in a window bucket."""
    is_causal: bool = False
    """Whether queries and keys are the same tokens, from the start of the sequence."""
    padded: Tensor | None = None
    """[count * width] indices of the queries in the batch; None without padding."""
    kept: Tensor | None = None
    """Indices of the real queries among the padded ones."""
    bucket: WindowBucket | None = None
    """The window bucket whose first `count` rows are the requests' keys and values."""
    bucket_slots: Tensor | None = None
    """[count] positions of the new keys in the bucket's flattened rows."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Return [count, 1, width, keys], 0 where a query sees a key and else minus infinity; None if causal."""
        if window is not None and window >= self.keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if self.is_causal and window is None:
            return None
        keys = torch.arange(self.keys, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        return torch.zeros(visible.shape, dtype=self.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)


@dataclass
class SingleTokens:
    """The first `count` tokens of a batch, each of which attends alone to the keys in its request's blocks."""

    count: int
    tables: Tensor
    """[chunk, block] of the cache."""
    owners: Tensor
    """[count]: each token's row of the tables."""
    longest: int
    """The most keys of a token."""


@dataclass
class Batch:
    """A step's chunks in the order of their tokens; `ids`, `positions` and `slots` have one entry per token."""

    chunks: list[Chunk]
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """Slots of the KV cache for the tokens' keys and values."""
    groups: list[AttentionGroup]
    single_tokens: SingleTokens | None = None


def make_batch(
    chunks: Sequence[Chunk],
    device: torch.device,
    dtype: torch.dtype,
    window: KVWindow | None = None,
    *,
    single_tokens: bool = False,
    doubled: bool = False,
) -> Batch:
    """Lay out chunks as a batch; `dtype` is the model's.

    With a `window` decode tokens attend to its rows, as far as there are any. `single_tokens`: tokens of short chunks
    attend one by one. `doubled`: the only token is computed twice, since a CPU rounds single rows differently.
    """
    ordered: list[Chunk] = []
    groups: list[AttentionGroup] = []
    begin = 0
    if window is not None:
        decodes = {chunk.request: chunk for chunk in chunks if chunk.is_decode}
        for bucket in window.arrange(decodes):
            own = [decodes.pop(request) for request in bucket.requests]
            groups.append(_window_group(bucket, own, begin, device, dtype))
            ordered += own
            begin += len(own)
        chunks = [*decodes.values(), *(chunk for chunk in chunks if not chunk.is_decode)]
    singles = None
    if single_tokens:
        ordered = [chunk for chunk in chunks if chunk.end - chunk.start <= MAX_SINGLE_CHUNK]
        begin = sum(chunk.end - chunk.start for chunk in ordered)
        chunks = [chunk for chunk in chunks if chunk.end - chunk.start > MAX_SINGLE_CHUNK]
        longest = max((chunk.end for chunk in ordered), default=0)
        owners = torch.from_numpy(np.repeat(np.arange(len(ordered)), [chunk.end - chunk.start for chunk in ordered]))
        tables = torch.from_numpy(block_tables([chunk.request for chunk in ordered], blocks_for(longest)))
        singles = SingleTokens(len(owners) << doubled, tables, owners.repeat(1 + doubled), longest)
    for width, grouped in group_by_shape(chunks):
        end = begin + sum(chunk.end - chunk.start for chunk in grouped)
        groups.append(_block_group(grouped, width, begin, end, device, dtype))
        ordered += grouped
        begin = end
    ids = [token for chunk in ordered for token in chunk.request.tokens[chunk.start : chunk.end]]
    places = [(chunk.request.blocks, position) for chunk in ordered for position in range(chunk.start, chunk.end)]
    positions = [position for _, position in places]
    slots = [blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for blocks, position in places]
    if doubled:
        ids, positions, slots = ids * 2, positions * 2, slots * 2
    on_device = torch.tensor([ids, positions, slots], device=device)
    return Batch(ordered, on_device[0], on_device[1], on_device[2], groups, singles)


def group_by_shape(chunks: Iterable[Chunk]) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield (width, chunks) for each group of chunks that attend together, padded to `width` queries.

    The width of a prefill chunk depends on the chunk alone, and so does the rounding of its attention. Masked keys do
    not change rounding, so decode tokens are grouped wherever that is cheaper.
    """
    decodes: list[Chunk] = []
    prefills: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        length = chunk.end - chunk.start
        if length == 1:
            decodes.append(chunk)
        else:
            reach = chunk.end.bit_length() if chunk.start else 0
            prefills.setdefault((padded_width(length), reach), []).append(chunk)
    decodes.sort(key=lambda chunk: chunk.end)
    group: list[Chunk] = []
    needed = 0
    for chunk in decodes:
        if group and chunk.end * (len(group) + 1) > MAX_PADDING_RATIO * (needed + chunk.end) + FREE_PADDING_KEYS:
            yield 1, group
            group, needed = [], 0
        group.append(chunk)
        needed += chunk.end
    if group:
        yield 1, group
    yield from ((width, grouped) for (width, _), grouped in prefills.items())


def padded_width(length: int) -> int:
    """Return a chunk's length rounded up: by at most a quarter, or to whole blocks."""
    step = max(BLOCK_SIZE, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _block_group(
    chunks: list[Chunk], width: int, begin: int, end: int, device: torch.device, dtype: torch.dtype
) -> AttentionGroup:
    """Group chunks whose keys are gathered from their requests' blocks."""
    is_causal = width > 1 and not any(chunk.start for chunk in chunks)
    blocks = blocks_for(width if is_causal else max(chunk.end for chunk in chunks))
    lengths = [chunk.end - chunk.start for chunk in chunks]
    padded = kept = None
    if any(length < width for length in lengths):
        columns = np.arange(width)[None]
        counts = np.array(lengths)[:, None]
        firsts = begin + np.cumsum([0, *lengths[:-1]])[:, None]
        padded = torch.from_numpy((firsts + np.minimum(columns, counts - 1)).ravel()).to(device)
        kept = torch.from_numpy(np.flatnonzero(columns < counts)).to(device)
    starts = np.array([chunk.start for chunk in chunks])[:, None]
    return AttentionGroup(
        begin,
        end,
        count=len(chunks),
        width=width,
        keys=blocks * BLOCK_SIZE,
        blocks=torch.from_numpy(block_tables([chunk.request for chunk in chunks], blocks)).to(device),
        positions=torch.from_numpy(starts + np.arange(width)).to(device),
        is_causal=is_causal,
        padded=padded,
        kept=kept,
        dtype=dtype,
    )


def _window_group(
    bucket: WindowBucket, chunks: list[Chunk], begin: int, device: torch.device, dtype: torch.dtype
) -> AttentionGroup:
    """Group the decode tokens of a window bucket's requests."""
    positions = torch.tensor([chunk.start for chunk in chunks], device=device)
    rows = torch.arange(len(chunks), device=device)
    return AttentionGroup(
        begin,
        begin + len(chunks),
        count=len(chunks),
        width=1,
        keys=blocks_for(max(chunk.end for chunk in chunks)) * BLOCK_SIZE,
        positions=positions[:, None],
        dtype=dtype,
        bucket=bucket,
        bucket_slots=rows * bucket.length + positions,
    )


def block_tables(requests: Sequence[Request], blocks: int) -> np.ndarray:
    """Return [request, block]: the first blocks of each request, filled up with the padding block."""
    tables = np.full((len(requests), blocks), PADDING_BLOCK)
    for row, request in zip(tables, requests, strict=True):
        own = request.blocks[:blocks]
        row[: len(own)] = own
    return tables
