"""The chunks of a step as tensors: one row of tokens for the whole batch, and who attends to what.

All tokens of a step go through the model side by side, without padding: only attention knows that they belong to
different requests. Chunks of similar shape attend together, as an `Attention`: padded among themselves, with the keys
that their blocks hold, or that lie side by side in the window. Tokens are in the order of these groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.blocks import BLOCK, PADDING, blocks_for
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Chunk
from headrace.inference.embedded.window import Room, Window

SLACK = 1.25
"""Keys that may be read for one that is needed, before requests of other lengths attend apart."""
FREE_KEYS = 2048
"""Keys that cost less than another group."""
NARROW = 128
"""Tokens of a chunk up to which each attends by itself, where that can be."""


@dataclass
class Attention:
    """Chunks that attend together: `count` of them, each padded to `width` queries and to the same number of keys."""

    begin: int
    """Where their tokens begin in the batch."""
    end: int
    count: int
    width: int
    keys: int
    blocks: Tensor | None
    """[count, keys / BLOCK] of the cache, which hold all keys in order; None if they are in a room."""
    positions: Tensor
    """[count, width] of the queries."""
    is_causal: bool
    """Whether queries and keys are the same tokens, from the beginning."""
    padded: Tensor | None
    """Where in the batch the queries are, if any is padded: [count * width]."""
    kept: Tensor | None
    """Where among the padded queries those of the batch are."""
    dtype: torch.dtype
    room: Room | None = None
    """The room whose rows they have, in order."""
    places: Tensor | None = None
    """[count] of that room, where the new keys go: its rows are one after the other."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[count, 1, width, keys], 0 where a query sees a key and else minus infinity; None for causal attention."""
        if window is not None and window >= self.keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._visible(window)
        return self._masks[window]

    def _visible(self, window: int | None) -> Tensor | None:
        if self.is_causal and window is None:
            return None
        keys = torch.arange(self.keys, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        return torch.zeros(visible.shape, dtype=self.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)


@dataclass
class OneByOne:
    """The first tokens of a batch, where each attends by itself to the keys in its request's blocks."""

    count: int
    tables: Tensor
    """[chunk, block]."""
    owners: Tensor
    """[count]: the row of the tables that each token has."""
    longest: int
    """The most keys that any attends to."""


@dataclass
class Batch:
    """`chunks` in the order of their tokens; `ids`, `positions` and `slots` have one entry per token."""

    chunks: list[Chunk]
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """Where in the cache the keys and values go."""
    groups: list[Attention]
    one_by_one: OneByOne | None = None


def make_batch(
    chunks: Sequence[Chunk],
    device: torch.device,
    dtype: torch.dtype,
    window: Window | None = None,
    *,
    one_by_one: bool = False,
    doubled: bool = False,
) -> Batch:
    """`dtype` is the model's. With a `window` the newest tokens attend there, as far as they have rows.

    `one_by_one`: tokens of narrow chunks need no group to attend in.
    `doubled`: a single token is computed twice. A CPU multiplies one row in another order than many.
    """
    ordered: list[Chunk] = []
    groups: list[Attention] = []
    begin = 0
    if window is not None:
        newest = {chunk.request: chunk for chunk in chunks if chunk.is_newest}
        for room in window.arrange(newest):
            own = [newest.pop(request) for request in room.requests]
            groups.append(_attention_in(room, own, begin, device, dtype))
            ordered += own
            begin += len(own)
        chunks = [*newest.values(), *(chunk for chunk in chunks if not chunk.is_newest)]
    if one_by_one:
        ordered = [chunk for chunk in chunks if chunk.end - chunk.start <= NARROW]
        begin = sum(chunk.end - chunk.start for chunk in ordered)
        chunks = [chunk for chunk in chunks if chunk.end - chunk.start > NARROW]
    narrow = _one_by_one(ordered, doubled=doubled) if one_by_one else None
    for width, alike in alike_in_shape(chunks):
        end = begin + sum(chunk.end - chunk.start for chunk in alike)
        groups.append(_attention(alike, width, begin, end, device, dtype))
        ordered += alike
        begin = end
    ids = [token for chunk in ordered for token in chunk.request.tokens[chunk.start : chunk.end]]
    positions = [position for chunk in ordered for position in range(chunk.start, chunk.end)]
    slots = [slot for chunk in ordered for slot in _slots(chunk)]
    if doubled:
        ids, positions, slots = ids * 2, positions * 2, slots * 2
    on_device = torch.tensor([ids, positions, slots], device=device)
    return Batch(ordered, on_device[0], on_device[1], on_device[2], groups, narrow)


def alike_in_shape(chunks: Iterable[Chunk]) -> Iterator[tuple[int, list[Chunk]]]:
    """Chunks that attend together, with the number of queries that each is padded to.

    How wide a prompt's chunk is depends on itself alone: so does how its attention is rounded. Masked keys round
    nothing, so that the next tokens of requests attend together wherever that is cheaper.
    """
    newest: list[Chunk] = []
    others: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        length = chunk.end - chunk.start
        if length == 1:
            newest.append(chunk)
        else:
            reach = chunk.end.bit_length() if chunk.start else 0
            others.setdefault((padded_width(length), reach), []).append(chunk)
    newest.sort(key=lambda chunk: chunk.end)
    group: list[Chunk] = []
    needed = 0
    for chunk in newest:
        if group and chunk.end * (len(group) + 1) > SLACK * (needed + chunk.end) + FREE_KEYS:
            yield 1, group
            group, needed = [], 0
        group.append(chunk)
        needed += chunk.end
    if group:
        yield 1, group
    yield from ((width, alike) for (width, _), alike in others.items())


def padded_width(length: int) -> int:
    """At most a quarter more, or what makes whole blocks."""
    step = max(BLOCK, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _attention(
    chunks: list[Chunk], width: int, begin: int, end: int, device: torch.device, dtype: torch.dtype
) -> Attention:
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
    return Attention(
        begin,
        end,
        count=len(chunks),
        width=width,
        keys=blocks * BLOCK,
        blocks=torch.from_numpy(block_tables([chunk.request for chunk in chunks], blocks)).to(device),
        positions=torch.from_numpy(starts + np.arange(width)).to(device),
        is_causal=is_causal,
        padded=padded,
        kept=kept,
        dtype=dtype,
    )


def _attention_in(room: Room, chunks: list[Chunk], begin: int, device: torch.device, dtype: torch.dtype) -> Attention:
    """The newest tokens of a room's requests."""
    positions = torch.tensor([chunk.start for chunk in chunks], device=device)
    rows = torch.arange(len(chunks), device=device)
    return Attention(
        begin,
        begin + len(chunks),
        count=len(chunks),
        width=1,
        keys=blocks_for(max(chunk.end for chunk in chunks)) * BLOCK,
        blocks=None,
        positions=positions[:, None],
        is_causal=False,
        padded=None,
        kept=None,
        dtype=dtype,
        room=room,
        places=rows * room.length + positions,
    )


def _one_by_one(chunks: list[Chunk], *, doubled: bool) -> OneByOne:
    lengths = [chunk.end - chunk.start for chunk in chunks]
    longest = max((chunk.end for chunk in chunks), default=0)
    owners = torch.from_numpy(np.repeat(np.arange(len(chunks)), lengths))
    tables = torch.from_numpy(block_tables([chunk.request for chunk in chunks], blocks_for(longest)))
    return OneByOne(len(owners) << doubled, tables, owners.repeat(1 + doubled), longest)


def _slots(chunk: Chunk) -> Iterator[int]:
    """Where the keys of a chunk's own tokens go."""
    blocks = chunk.request.blocks
    return (blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(chunk.start, chunk.end))


def block_tables(requests: Sequence[Request], blocks: int) -> np.ndarray:
    """[request, block]: the first blocks of each; what it does not have is read from the padding."""
    tables = np.full((len(requests), blocks), PADDING)
    for row, request in zip(tables, requests, strict=True):
        own = request.blocks[:blocks]
        row[: len(own)] = own
    return tables
