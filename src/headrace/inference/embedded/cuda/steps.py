"""The two kinds of forwards on a GPU, and what their tokens attend to.

`Decoding`: the newest token of each request, through the paged kernel; it reads nothing but tensors that stay where
they are, so that it can be captured. `Prefill`: stretches of prompts, through torch's varlen flash attention where that
can compute them, and else, as on a CPU, in padded groups over gathered blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from headrace.inference.embedded.batch import Attention, Batch, make_batch
from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.cuda.attention_kernels import Partial, decode_attention
from headrace.inference.embedded.cuda.rows import Rows
from headrace.inference.embedded.kv_cache import attend_in_group, gathered
from headrace.inference.embedded.scheduler import Chunk

FLASH_TYPES = (torch.bfloat16, torch.float16)
# Grouped heads need no telling before torch 2.12.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


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


class Prefill:
    """Stretches of requests' tokens, back to back. `chunks` are in the order of the tokens."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, dtype: torch.dtype, *, flash: bool) -> None:
        self.groups: list[Attention] = []
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
        begins = np.cumsum([0, *(ends - starts)])
        self.longest_query = int((ends - starts).max())
        self.longest_key = int(ends.max())
        parts = [ids, positions, slots, begins]
        if starts.any():  # of some the beginning is in the cache already
            parts += [np.cumsum([0, *ends]), np.concatenate([_slots(chunk, 0) for chunk in chunks])]
        sent = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        on_device = (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)
        self.ids, self.positions, self.slots, query_begins, *more = torch.split(
            on_device, [len(part) for part in parts]
        )
        self._query_begins = query_begins.int()
        self._key_begins = more[0].int() if more else self._query_begins
        self._key_slots = more[1] if more else None

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
        if self._key_slots is not None:
            key, value = (_selected(states, self._key_slots) for states in storage)
        attended = varlen_attn(
            query,
            key,
            value,
            self._query_begins,
            self._key_begins,
            self.longest_query,
            self.longest_key,
            scale=scaling,
            window_size=(window - 1 if window else -1, 0),  # aligned at the ends of queries and keys
            **_GROUPED,
        )
        assert isinstance(attended, Tensor)
        return attended


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


def _slots(chunk: Chunk, start: int) -> np.ndarray:
    """Where the keys of a request's tokens are, from `start` to the chunk's end."""
    positions = np.arange(start, chunk.end)
    return np.array(chunk.request.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def _selected(states: Tensor, slots: Tensor) -> Tensor:
    """[token, head, dimension] of those slots. As rows of all heads: that moves whole rows."""
    return states.view(len(states), -1).index_select(0, slots).view(-1, *states.shape[1:])
