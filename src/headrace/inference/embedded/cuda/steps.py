"""The attention of the two kinds of forwards on a GPU.

`GraphedStep`: decode tokens and short prefills, with the paged kernels; it reads only fixed tensors, so that it can be
captured as a CUDA graph. `PrefillStep`: long prefills, with torch's varlen flash attention where it supports the model,
and otherwise, as on a CPU, in padded groups over gathered blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from headrace.inference.embedded.batch import AttentionGroup, Batch, make_batch
from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.cuda.attention import KVPair
from headrace.inference.embedded.cuda.attention_kernels import PartialResults, decode_attention, prefill_attention
from headrace.inference.embedded.cuda.rows import StepRows
from headrace.inference.embedded.kv_cache import attend_in_group, gather_blocks
from headrace.inference.embedded.scheduler import Chunk

FLASH_TYPES = (torch.bfloat16, torch.float16)
MAX_GATHERED_KEYS = 1 << 17
"""Cached keys that a prefill copies together, unless a single request has more."""
# Before torch 2.12 grouped heads need no argument.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class StepShape(NamedTuple):
    """What a CUDA graph fixes of a step."""

    tokens: int
    has_prefill: bool
    """Whether some requests have several tokens."""


class GraphedStep:
    """Decode tokens and, if the shape has them, short prefills: the inputs that `rows` sent to the device."""

    def __init__(self, rows: StepRows, shape: StepShape, partial: PartialResults) -> None:
        inputs, tokens = rows.inputs, shape.tokens
        self.num_rows = count = min(tokens, rows.count)
        """Rows that are sampled: the first ones."""
        self.ids, self.positions, self.slots = inputs.ids[:tokens], inputs.positions[:tokens], inputs.slots[:tokens]
        self.sources = inputs.sources[:count]
        self.temperatures, self.uniforms = inputs.temperatures[:count], inputs.uniforms[:count]
        self._tables, self._lengths = rows.tables[:count], inputs.lengths[:count]
        self._items = inputs.items[: rows.max_items(count)]
        self._tiles = inputs.tiles[: rows.max_tiles(tokens)] if shape.has_prefill else None
        self._partial = partial

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVPair, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        settings: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap}
        inputs, count = (self._tables, self._lengths, self._items), self.num_rows
        decode_attention(query[:count], *cache, *inputs, self._partial, output[:count], **settings)
        if self._tiles is not None:  # after the other kernel, which writes zeros to rows without keys
            prefill_attention(query, *cache, self._tables, self._tiles, output, **settings)
        return output


class _VarlenCall(NamedTuple):
    """Chunks that attend in one call of varlen attention."""

    queries: slice
    """Of the tokens of the step."""
    slots: Tensor | None
    """Slots of their keys in the cache; None: the keys of the step's own tokens."""
    query_begins: Tensor
    key_begins: Tensor
    longest_query: int
    longest_key: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVPair, scaling: float, window: int) -> Tensor:
        """Return [token, head, dimension]; a chunk's queries are the last tokens of its keys."""
        if self.slots is not None:  # gathers whole rows of all heads
            key, value = (
                states.view(len(states), -1).index_select(0, self.slots).view(-1, *states.shape[1:]) for states in cache
            )
        begins, longest = (self.query_begins, self.key_begins), (self.longest_query, self.longest_key)
        options = {"scale": scaling, "window_size": (window - 1 if window else -1, 0), **_GROUPED}
        output = varlen_attn(query[self.queries], key, value, *begins, *longest, **options)
        assert isinstance(output, Tensor)  # and not a pair, as with more outputs
        return output


class PrefillStep:
    """Chunks of requests' tokens in one row; `chunks` are in the order of the tokens."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, dtype: torch.dtype, *, flash: bool) -> None:
        self.groups: list[AttentionGroup] = []
        self.calls: list[_VarlenCall] = []
        if flash:
            self.chunks = join_chunks(chunks)
            self._lay_out(device)
        else:
            batch: Batch = make_batch(chunks, device, dtype)
            self.chunks = batch.chunks
            self.ids, self.positions, self.slots, self.groups = batch.ids, batch.positions, batch.slots, batch.groups

    def _lay_out(self, device: torch.device) -> None:
        """Create all tensors with one copy to the device."""
        chunks = self.chunks
        starts = np.array([chunk.start for chunk in chunks])
        ends = np.array([chunk.end for chunk in chunks])
        ids = np.concatenate([np.array(chunk.request.tokens[chunk.start : chunk.end]) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots = np.concatenate([_slots(chunk, chunk.start) for chunk in chunks])
        parts = [ids, positions, slots]
        is_cached = bool(starts.any())  # some chunks begin after cached tokens
        calls = [*_split_by_keys(ends)] if is_cached else [slice(0, len(chunks))]
        for each in calls:
            parts.append(np.cumsum([0, *(ends - starts)[each]]))
            if is_cached:
                parts += [np.cumsum([0, *ends[each]]), np.concatenate([_slots(chunk, 0) for chunk in chunks[each]])]
        sent = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        on_device = (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)
        self.ids, self.positions, self.slots, *more = torch.split(on_device, [len(part) for part in parts])
        tensors = iter(more)
        begins = np.cumsum([0, *(ends - starts)]).tolist()
        for each in calls:
            query_begins = next(tensors).int()
            key_begins = next(tensors).int() if is_cached else query_begins
            key_slots = next(tensors) if is_cached else None
            queries = slice(begins[each.start], begins[each.stop])
            longest = int((ends - starts)[each].max()), int(ends[each].max())
            self.calls.append(_VarlenCall(queries, key_slots, query_begins, key_begins, *longest))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVPair, *, scaling: float, window: int, softcap: float
    ) -> Tensor:
        if self.groups:
            parts = []
            for group in self.groups:
                assert group.blocks is not None
                keys, values = (gather_blocks(states, group.blocks) for states in cache)
                mask = group.mask(window or None)
                parts.append(attend_in_group(group, query, keys, values, mask, scaling, softcap or None))
            return torch.cat(parts)
        attended = [each.attend(query, key, value, cache, scaling, window) for each in self.calls]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def can_flash(dtype: torch.dtype, dim: int, device: torch.device, softcap: float | None) -> bool:
    """Return whether torch's varlen attention supports a model."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in FLASH_TYPES
        and dim % 8 == 0
        and dim <= 256
        and not softcap
    )


def join_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Join consecutive chunks of a request, which only the CPU's attention computes separately."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and joined[-1].request is chunk.request and joined[-1].end == chunk.start:
            joined[-1] = joined[-1]._replace(end=chunk.end)
        else:
            joined.append(chunk)
    return joined


def _split_by_keys(ends: np.ndarray) -> Iterator[slice]:
    """Split chunks with these numbers of keys so that `MAX_GATHERED_KEYS` bounds each part."""
    first, keys = 0, 0
    for index, count in enumerate(ends.tolist()):
        if index > first and keys + count > MAX_GATHERED_KEYS:
            yield slice(first, index)
            first, keys = index, 0
        keys += count
    yield slice(first, len(ends))


def _slots(chunk: Chunk, start: int) -> np.ndarray:
    """Return the slots of a request's tokens from `start` to the chunk's end."""
    positions = np.arange(start, chunk.end)
    return np.array(chunk.request.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
