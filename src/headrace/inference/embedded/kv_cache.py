"""Keys and values in blocks, behind transformers' `Cache`, and the attention that reads them.

Storage is one row of slots per layer, `BLOCK` of them to a block; which belong to whom, the `Batch` of a forward says.
The cache writes what a forward computes to its slots, and the attention function takes its masks and the places of its
keys from the batch: models need to know nothing of either. Requests that are sampled from have their keys and values a
second time, in the rows of a window (see `window`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from headrace.inference.embedded.batch import Attention, Batch, block_tables
from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.window import Room

ATTENTION = "headrace_paged"
"""The name under which the attention function is registered with transformers."""


class KVCache(Cache):  # type: ignore[misc]
    """All layers of all blocks."""

    def __init__(self, num_layers: int, blocks: int) -> None:
        self.slots = blocks * BLOCK
        self.batch: Batch | None = None
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def prepare(self, batch: Batch, unproven: Sequence[int] = ()) -> None:
        """The next forward is for this batch: rows of the window are brought in order for it.

        What blocks hold that are `unproven`, and rows that nobody has now, is forgotten: keys that are not finite
        would poison their next owner through the mask.
        """
        self.batch = batch
        rooms = {group.room.length: group.room for group in batch.groups if group.room is not None}
        slots = [block * BLOCK + offset for block in unproven for offset in range(BLOCK)]
        for layer in self._used():
            layer.keep(rooms)
            if slots:
                layer.clear(slots)
        for room in rooms.values():
            tables = None
            if room.fillings:
                longest = max(len(filling.request.blocks) for filling in room.fillings)
                tables = torch.from_numpy(block_tables([filling.request for filling in room.fillings], longest))
            for layer in self._used():
                layer.arrange(room, tables, clean=bool(slots))

    def _used(self) -> Iterator[_Layer]:
        """Those that have keys of their own: some models let layers attend to those of others."""
        return (layer for layer in self.layers if layer.is_initialized)

    def storage(self, index: int, heads: int, dim: int) -> _Layer:
        """The slots of a layer, with room for keys of that shape."""
        layer: _Layer = self.layers[index]
        if not layer.is_initialized:
            none = torch.empty(1, heads, 0, dim)
            layer.lazy_initialization(none, none)
        return layer

    def layer_of(self, keys: Tensor) -> _Layer:
        """Whose storage that is: a model may attend to another layer's keys."""
        address = keys.data_ptr()
        return next(layer for layer in self._used() if layer.keys.data_ptr() == address)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks."""
        for layer in self._used():
            for states in (layer.keys, layer.values):
                blocks = states.view(-1, BLOCK, *states.shape[1:])
                blocks[list(targets)] = blocks[list(sources)]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's slots: [slot, head, dimension]."""

    is_sliding = False  # windows are a matter of the mask; every key stays

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        """Of the window, by the length of the room: [row, token, head, dimension]."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write what is new, [1, head, token, dimension], and give the whole storage in that form."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.cache.batch
        assert batch is not None
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.keys.index_copy_(0, batch.slots, keys)
        self.values.index_copy_(0, batch.slots, values)
        for group in batch.groups:
            if group.room is not None and group.places is not None:
                for rows, states in zip(self._rows[group.room.length], (keys, values), strict=True):
                    rows.view(-1, *rows.shape[2:]).index_copy_(0, group.places, states[group.begin : group.end])
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def keep(self, lengths: Collection[int]) -> None:
        """Of the window, those rooms alone."""
        if len(self._rows) > len(lengths):
            self._rows = {length: rows for length, rows in self._rows.items() if length in lengths}

    def clear(self, slots: Sequence[int]) -> None:
        self.keys[slots] = 0
        self.values[slots] = 0

    def arrange(self, room: Room, tables: Tensor | None, *, clean: bool) -> None:
        """Copy and fill the rows of a room; `tables` are the blocks of those that are filled.

        `clean`: what a row held that is filled, or that nobody has, is overwritten.
        """
        filled = [filling.row for filling in room.fillings]
        for rows, states in zip(self._rows_for(room), (self.keys, self.values), strict=True):
            if room.copies:
                sources, targets = zip(*room.copies, strict=True)
                rows[list(targets)] = rows[list(sources)]
            if clean:
                rows[filled] = 0
                rows[len(room.requests) :] = 0
            if tables is not None:
                states = gathered(states, tables)
                rows[filled, : states.shape[1]] = states

    def read(self, group: Attention) -> tuple[Tensor, Tensor]:
        """The keys and values that a group attends to: [request, token, head, dimension]."""
        if group.room is not None:
            keys, values = self._rows[group.room.length]
            return keys[: group.count, : group.keys], values[: group.count, : group.keys]
        assert group.blocks is not None
        return gathered(self.keys, group.blocks), gathered(self.values, group.blocks)

    def _rows_for(self, room: Room) -> tuple[Tensor, Tensor]:
        """The storage of a room, enlarged if it has become too small."""
        rows = self._rows.get(room.length)
        if rows is None or room.rows > len(rows[0]):
            shape = room.rows, room.length
            larger = [states.new_zeros(*shape, *states.shape[1:]) for states in (self.keys, self.values)]
            for new, old in zip(larger, rows or (), strict=False):
                new[: len(old)] = old
            rows = self._rows[room.length] = larger[0], larger[1]
        return rows

    def _allocate(self, like: Tensor) -> Tensor:
        """Zeros: what a mask hides must still be finite. On a CPU memory that nobody writes to is not taken yet."""
        shape = (self.cache.slots, like.shape[1], like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        size = like.element_size() * int(np.prod(shape))
        return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)

    def get_seq_length(self) -> int:
        return 0  # requests have different lengths: positions are always given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return int(self.cache.slots)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: KVCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a whole batch; the model's own mask is not used."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    batch, layer = paged.batch, paged.layer_of(key)
    assert batch is not None
    queries = query[0].transpose(0, 1)
    parts = [
        attend_in_group(group, queries, *layer.read(group), group.mask(sliding_window), scaling, softcap)
        for group in batch.groups
    ]
    if len(queries) > batch.groups[-1].end:
        parts *= 2  # a token that is there twice
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def attend_in_group(
    group: Attention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """[token, head, dimension] of one group; its keys and values are [request, token, head, dimension]."""
    count, width = group.count, group.width
    own = queries[group.begin : group.end] if group.padded is None else queries.index_select(0, group.padded)
    query = own.view(count, width, *own.shape[1:]).transpose(1, 2)
    key, value = keys.transpose(1, 2), values.transpose(1, 2)
    shared = query.shape[1] // key.shape[1]
    if width == 1 and shared > 1:  # the heads that share a key become its queries: no copy of keys
        folded = query.reshape(count, key.shape[1], shared, -1)
        attended = _softmax_attention(folded, key, value, mask, scaling, softcap)
    else:
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        attended = _softmax_attention(query, key, value, mask, scaling, softcap).transpose(1, 2)
    output = attended.reshape(count * width, query.shape[1], -1)
    return output if group.kept is None else output.index_select(0, group.kept)


def gathered(states: Tensor, tables: Tensor) -> Tensor:
    """[row, token, head, dimension] of the blocks in each row. Whole blocks at a time: faster than slots by a third."""
    blocks = states.view(-1, BLOCK * states[0].numel()).index_select(0, tables.reshape(-1))
    return blocks.view(len(tables), -1, *states.shape[1:])


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    weights = torch.softmax(scores + mask, -1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


AttentionInterface.register(ATTENTION, paged_attention)
