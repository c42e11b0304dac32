"""The two kinds of forwards on a GPU, and what their tokens attend to.

`Decoding`: the newest token of each request, through the paged kernel; it reads nothing but tensors that stay where
they are, so that it can be captured. `Prefill`: stretches of prompts, through torch's varlen flash attention where that
can compute them, and else, as on a CPU, in padded groups over gathered blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.batch import Attention, Batch, make_batch
from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.cuda.attention_kernels import Partial, decode_attention
from headrace.inference.embedded.cuda.rows import Rows
from headrace.inference.embedded.cuda.varlen import varlen_attention
from headrace.inference.embedded.kv_cache import attend_in_group, gathered
from headrace.inference.embedded.scheduler import Chunk

FLASH_TYPES = (torch.bfloat16, torch.float16)
GATHERED = 1 << 17
"""Keys of the cache that are read at once for prompts, if no single one has more: they are copied for that."""


class Decoding:
    """One token for each of the first `rows` rows."""

    def __init__(self, rows: Rows, count: int, partial: Partial) -> None:
        inputs = rows.inputs
        self.ids, self.positions = inputs.ids[:count], inputs.positions[:count]
        self.temperatures, self.uniforms = inputs.temperatures[:count], inputs.uniforms[:count]
        self.slots = inputs.slots[:count]
        self._tables, self._lengths = rows.tables[:count], inputs.lengths[:count]
        self._items, self._spans = inputs.items[: rows.room(count)], inputs.spans[:count]
        self._partial = partial

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        storage: tuple[Tensor, Tensor],
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decode_attention(
            query,
            *storage,
            self._tables,
            self._lengths,
            self._items,
            self._spans,
            self._partial,
            output,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
        return output


class _Stretches(NamedTuple):
    """Chunks that attend in one call."""

    queries: slice
    """Of the tokens of the step."""
    slots: Tensor | None
    """Where their keys are in the cache; None: they are the tokens' own."""
    query_begins: Tensor
    key_begins: Tensor
    longest_query: int
    longest_key: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, storage: tuple[Tensor, Tensor], scaling: float, window: int
    ) -> Tensor:
        if self.slots is not None:
            key, value = (_selected(states, self.slots) for states in storage)
        return varlen_attention(
            query[self.queries],
            key,
            value,
            self.query_begins,
            self.key_begins,
            self.longest_query,
            self.longest_key,
            scaling=scaling,
            window=window,
        )


class Prefill:
    """Stretches of requests' tokens, back to back. `chunks` are in the order of the tokens."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, dtype: torch.dtype, *, flash: bool) -> None:
        self.groups: list[Attention] = []
        self.stretches: list[_Stretches] = []
        if flash:
            self.chunks = _joined(chunks)
            self._lay_out(device)
        else:
            batch: Batch = make_batch(chunks, device, dtype)
            self.chunks = batch.chunks
            self.ids, self.positions, self.slots, self.groups = batch.ids, batch.positions, batch.slots, batch.groups

    def _lay_out(self, device: torch.device) -> None:
        """Everything in one copy to the device."""
        chunks = self.chunks
        starts = np.array([chunk.start for chunk in chunks])
        ends = np.array([chunk.end for chunk in chunks])
        ids = np.concatenate([np.array(chunk.request.tokens[chunk.start : chunk.end]) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots = np.concatenate([_slots(chunk, chunk.start) for chunk in chunks])
        parts = [ids, positions, slots]
        is_cached = bool(starts.any())  # of some the beginning is in the cache already
        together = [*_together(ends)] if is_cached else [slice(0, len(chunks))]
        for each in together:
            parts.append(np.cumsum([0, *(ends - starts)[each]]))
            if is_cached:
                parts += [np.cumsum([0, *ends[each]]), np.concatenate([_slots(chunk, 0) for chunk in chunks[each]])]
        sent = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        on_device = (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)
        self.ids, self.positions, self.slots, *more = torch.split(on_device, [len(part) for part in parts])
        tensors = iter(more)
        begins = np.cumsum([0, *(ends - starts)]).tolist()
        for each in together:
            query_begins = next(tensors).int()
            key_begins = next(tensors).int() if is_cached else query_begins
            self.stretches.append(
                _Stretches(
                    slice(begins[each.start], begins[each.stop]),
                    next(tensors) if is_cached else None,
                    query_begins,
                    key_begins,
                    longest_query=int((ends - starts)[each].max()),
                    longest_key=int(ends[each].max()),
                )
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        storage: tuple[Tensor, Tensor],
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        if self.groups:
            parts = []
            for group in self.groups:
                assert group.blocks is not None
                keys, values = (gathered(states, group.blocks) for states in storage)
                mask = group.mask(window or None)
                parts.append(attend_in_group(group, query, keys, values, mask, scaling, softcap or None))
            return torch.cat(parts)
        attended = [each.attend(query, key, value, storage, scaling, window) for each in self.stretches]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def can_flash(dtype: torch.dtype, dim: int, device: torch.device, softcap: float | None) -> bool:
    """Whether torch's varlen kernel computes this model's attention."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in FLASH_TYPES
        and dim % 8 == 0
        and dim <= 256
        and not softcap
    )


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of a request that follow each other as one: there is no need to attend piece by piece."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and joined[-1].request is chunk.request and joined[-1].end == chunk.start:
            joined[-1] = joined[-1]._replace(end=chunk.end)
        else:
            joined.append(chunk)
    return joined


def _together(ends: np.ndarray) -> Iterator[slice]:
    """Chunks with these numbers of keys, cut where there would be too many to read at once."""
    first, keys = 0, 0
    for place, count in enumerate(ends.tolist()):
        if place > first and keys + count > GATHERED:
            yield slice(first, place)
            first, keys = place, 0
        keys += count
    yield slice(first, len(ends))


def _slots(chunk: Chunk, start: int) -> np.ndarray:
    """Where the keys of a request's tokens are, from `start` to the chunk's end."""
    positions = np.arange(start, chunk.end)
    return np.array(chunk.request.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def _selected(states: Tensor, slots: Tensor) -> Tensor:
    """[token, head, dimension] of those slots. As rows of all heads: that moves whole rows."""
    return states.view(len(states), -1).index_select(0, slots).view(-1, *states.shape[1:])
