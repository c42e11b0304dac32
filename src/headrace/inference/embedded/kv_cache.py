"""The paged KV cache behind transformers' `Cache` interface, and the attention function that reads it.

Storage is one row of slots per layer, `BLOCK_SIZE` slots per block. The `Batch` of a forward has the slots of its
tokens, the blocks of its requests and the masks, so models need no change. Decoding requests may have a second,
contiguous copy of their keys and values in the rows of a window (see `batch.KVWindow`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from headrace.inference.embedded.batch import AttentionGroup, Batch, WindowBucket, block_tables
from headrace.inference.embedded.block_manager import BLOCK_SIZE

ATTENTION = "headrace_paged"
"""Name of the attention function in transformers' registry."""


class KVCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers and blocks."""

    def __init__(self, num_layers: int, blocks: int) -> None:
        self.slots = blocks * BLOCK_SIZE
        self.batch: Batch | None = None
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def prepare(self, batch: Batch, unverified_blocks: Sequence[int] = ()) -> None:
        """Set the batch of the next forward, and bring the window's rows up to date for it.

        `unverified_blocks` and unused rows are cleared: keys that are not finite would reach the next request through
        the mask.
        """
        self.batch = batch
        buckets = {group.bucket.length: group.bucket for group in batch.groups if group.bucket is not None}
        slots = [block * BLOCK_SIZE + offset for block in unverified_blocks for offset in range(BLOCK_SIZE)]
        for layer in self.used_layers():
            layer.rows = {length: rows for length, rows in layer.rows.items() if length in buckets}
            if slots:
                layer.keys[slots] = 0
                layer.values[slots] = 0
        for bucket in buckets.values():
            tables = None
            if bucket.fills:
                requests = [fill.request for fill in bucket.fills]
                longest = max(len(request.blocks) for request in requests)
                tables = torch.from_numpy(block_tables(requests, longest))
            for layer in self.used_layers():
                layer.arrange(bucket, tables, clear=bool(slots))

    def used_layers(self) -> Iterator[_Layer]:
        """Return the layers with keys of their own: in some models layers attend to the keys of others."""
        return (layer for layer in self.layers if layer.is_initialized)

    def storage(self, index: int, heads: int, dim: int) -> _Layer:
        """Return a layer, allocated for keys of that shape."""
        layer: _Layer = self.layers[index]
        if not layer.is_initialized:
            empty = torch.empty(1, heads, 0, dim)
            layer.lazy_initialization(empty, empty)
        return layer

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for layer in self.used_layers():
            for states in (layer.keys, layer.values):
                blocks = states.view(-1, BLOCK_SIZE, *states.shape[1:])
                blocks[list(targets)] = blocks[list(sources)]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: [slot, head, dimension]."""

    is_sliding = False  # sliding windows are masked; every key is stored

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the window by row length: [row, token, head, dimension]."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [1, head, token, dimension], and return the whole storage in that form."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.cache.batch
        assert batch is not None
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.keys.index_copy_(0, batch.slots, keys)
        self.values.index_copy_(0, batch.slots, values)
        for group in batch.groups:
            if group.bucket is not None and group.bucket_slots is not None:
                for rows, states in zip(self.rows[group.bucket.length], (keys, values), strict=True):
                    rows.view(-1, *rows.shape[2:]).index_copy_(0, group.bucket_slots, states[group.begin : group.end])
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def arrange(self, bucket: WindowBucket, tables: Tensor | None, *, clear: bool) -> None:
        """Copy and fill the rows of a bucket; `tables` are the blocks of the requests that are filled in.

        `clear`: rows are zeroed before they are filled, and so are unused ones.
        """
        filled = [fill.row for fill in bucket.fills]
        for rows, states in zip(self._rows_for(bucket), (self.keys, self.values), strict=True):
            if bucket.copies:
                sources, targets = zip(*bucket.copies, strict=True)
                rows[list(targets)] = rows[list(sources)]
            if clear:
                rows[filled] = 0
                rows[len(bucket.requests) :] = 0
            if tables is not None:
                states = gather_blocks(states, tables)
                rows[filled, : states.shape[1]] = states

    def read(self, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a group attends to: [request, token, head, dimension]."""
        if group.bucket is not None:
            keys, values = self.rows[group.bucket.length]
            return keys[: group.count, : group.keys], values[: group.count, : group.keys]
        assert group.blocks is not None
        return gather_blocks(self.keys, group.blocks), gather_blocks(self.values, group.blocks)

    def _rows_for(self, bucket: WindowBucket) -> tuple[Tensor, Tensor]:
        """Return the rows of a bucket, reallocated if they have become too few."""
        rows = self.rows.get(bucket.length)
        if rows is None or bucket.rows > len(rows[0]):
            shape = bucket.rows, bucket.length
            larger = [states.new_zeros(*shape, *states.shape[1:]) for states in (self.keys, self.values)]
            for new, old in zip(larger, rows or (), strict=False):
                new[: len(old)] = old
            rows = self.rows[bucket.length] = larger[0], larger[1]
        return rows

    def _allocate(self, like: Tensor) -> Tensor:
        """Return zeros, since masked keys must be finite; on a CPU pages are allocated when they are first written."""
        shape = (self.cache.slots, like.shape[1], like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        size = like.element_size() * int(np.prod(shape))
        return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)

    def get_seq_length(self) -> int:
        return 0  # unused: positions are always passed

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
    """Compute the attention of the cache's batch; the model's own mask is not used."""
    batch = paged.batch
    # By its storage: a model may attend to another layer's keys.
    layer = next(layer for layer in paged.used_layers() if layer.keys.data_ptr() == key.data_ptr())
    assert batch is not None
    queries = query[0].transpose(0, 1)
    parts = [
        attend_in_group(group, queries, *layer.read(group), group.mask(sliding_window), scaling, softcap, s_aux)
        for group in batch.groups
    ]
    if len(queries) > batch.groups[-1].end:
        parts *= 2  # a doubled token
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def attend_in_group(
    group: AttentionGroup,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [token, head, dimension] of a group; its keys and values are [request, token, head, dimension].

    `sinks` are scores, one per query head, that take their share of the attention and have no value.
    """
    count, width = group.count, group.width
    own = queries[group.begin : group.end] if group.padded is None else queries.index_select(0, group.padded)
    query = own.view(count, width, *own.shape[1:]).transpose(1, 2)
    key, value = keys.transpose(1, 2), values.transpose(1, 2)
    shared = query.shape[1] // key.shape[1]
    if width == 1 and shared > 1:  # query heads that share a key head become its queries, without a copy of keys
        folded = query.reshape(count, key.shape[1], shared, -1)
        sinks = None if sinks is None else sinks.view(-1, shared)
        attended = _softmax_attention(folded, key, value, mask, scaling, softcap, sinks)
    else:
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        sinks = None if sinks is None else sinks.view(-1, 1)
        attended = _softmax_attention(query, key, value, mask, scaling, softcap, sinks).transpose(1, 2)
    output = attended.reshape(count * width, query.shape[1], -1)
    return output if group.kept is None else output.index_select(0, group.kept)


def gather_blocks(states: Tensor, tables: Tensor) -> Tensor:
    """Return [row, token, head, dimension] of the blocks in each row of `tables`; faster than gathering slots."""
    blocks = states.view(-1, BLOCK_SIZE * states[0].numel()).index_select(0, tables.reshape(-1))
    return blocks.view(len(tables), -1, *states.shape[1:])


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in each head; `sinks` are [head, 1 or query]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, :, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


AttentionInterface.register(ATTENTION, paged_attention)
