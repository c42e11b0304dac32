"""Keys and values of the running requests behind transformers' `Cache`: row i belongs to the i-th running request.

Rows are kept compact, so that a decode step reads the first n of them as a view, over as many keys as the longest
request has. Storage grows by doubling up to the limits. A forward says beforehand, as a `Prefill` or a `Decode`,
which positions it writes and reads; the attention function takes its mask from there, so that models need to know
nothing of rows.

Left out on purpose: pages. A row is as long as the longest request so far, and storage never shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = "headrace_slots"
"""The name under which the attention function is registered with transformers."""
KEY_BUCKET = 16
"""Decode steps attend over a multiple of this many keys: few distinct shapes, aligned masks."""
SMALLEST_LENGTH = 64


class Access(Protocol):
    """What one forward does to the rows."""

    def exchange(self, store: Tensor, new: Tensor) -> Tensor:
        """Write the new keys (or values) and return those to attend over."""
        ...

    def mask(self, window: int | None) -> Tensor | None:
        """True where a query sees a key; None for plain causal attention."""
        ...


class Prefill:
    """Positions [start, end) of some rows. Rows that end earlier are padded on the right.

    Padding needs no mask: no earlier query sees it, and a later token overwrites it before anything reads it.
    """

    def __init__(self, rows: Sequence[int], start: int, end: int, device: torch.device) -> None:
        self.start, self.end = start, end
        self.rows = torch.tensor(rows, device=device)
        self.positions = torch.arange(start, end, device=device)
        self._masks: dict[int, Tensor] = {}

    def exchange(self, store: Tensor, new: Tensor) -> Tensor:
        store[self.rows, :, self.start : self.end] = new
        return new if self.start == 0 else store[self.rows, :, : self.end]

    def mask(self, window: int | None) -> Tensor | None:
        window = self.end if window is None else min(window, self.end)
        if self.start == 0 and window == self.end:
            return None
        if window not in self._masks:
            keys = torch.arange(self.end, device=self.positions.device)
            self._masks[window] = _visible(self.positions[:, None], keys, window)[None, None]
        return self._masks[window]


class Decode:
    """The next token of each of the first rows, at its own position."""

    def __init__(self, positions: Tensor, key_length: int) -> None:
        self.positions = positions
        self.key_length = key_length
        self.rows = torch.arange(len(positions), device=positions.device)
        self._masks: dict[int, Tensor] = {}

    def exchange(self, store: Tensor, new: Tensor) -> Tensor:
        store[self.rows, :, self.positions] = new[:, :, 0]
        return store[: len(self.rows), :, : self.key_length]

    def mask(self, window: int | None) -> Tensor | None:
        window = self.key_length if window is None else min(window, self.key_length)
        if window not in self._masks:
            keys = torch.arange(self.key_length, device=self.positions.device)
            self._masks[window] = _visible(self.positions[:, None], keys, window)[:, None, None]
        return self._masks[window]


def _visible(positions: Tensor, keys: Tensor, window: int) -> Tensor:
    """Causal, and at most `window` keys back."""
    return (keys <= positions) & (keys > positions - window)


class KVCache(Cache):  # type: ignore[misc]
    """All layers of all rows."""

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self.max_rows, self.max_length = max_rows, max_length
        self.rows, self.length = 0, 0
        self.access: Access | None = None
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def reserve(self, rows: int, length: int) -> None:
        """Make room for that many rows of that length."""
        self.rows = max(self.rows, min(self.max_rows, _power_of_two(rows)))
        self.length = max(self.length, min(self.max_length, max(SMALLEST_LENGTH, _power_of_two(length))))
        for layer in self.layers:
            layer.grow()

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row to its target."""
        if not sources or length == 0:
            return
        device = self.layers[0].keys.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self.layers:
            for store in (layer.keys[:, :, :length], layer.values[:, :, :length]):
                store.index_copy_(0, target, store.index_select(0, source))

    def clear_row(self, row: int) -> None:
        """Forget a row's content: keys that are not finite would poison the row's next owner through the mask."""
        for layer in self.layers:
            layer.keys[row].zero_()
            layer.values[row].zero_()

    def release(self) -> None:
        """Give the storage back; the next forward allocates anew."""
        self.rows, self.length = 0, 0
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's rows: [row, head, position, dimension]."""

    is_sliding = False  # windows are a matter of the mask; every key stays

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        access = self.cache.access
        assert access is not None
        return access.exchange(self.keys, key_states), access.exchange(self.values, value_states)

    def grow(self) -> None:
        """Reallocate if the cache's limits have moved past this layer's storage."""
        if self.is_initialized and self.keys.shape[::2] != (self.cache.rows, self.cache.length):
            self.keys, self.values = self._enlarged(self.keys), self._enlarged(self.values)

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: what the mask hides must still be finite.
        return like.new_zeros(self.cache.rows, like.shape[1], self.cache.length, like.shape[3])

    def _enlarged(self, store: Tensor) -> Tensor:
        larger = self._allocate(store)
        larger[: store.shape[0], :, : store.shape[2]] = store
        return larger

    def get_seq_length(self) -> int:
        return 0  # requests have different lengths: positions are always given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return self.cache.max_length


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    access: Access,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a `Prefill` or a `Decode`; the model's own mask is not used."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    mask = access.mask(sliding_window)
    groups = query.shape[1] // key.shape[1]
    one_query = query.shape[2] == 1
    if one_query and groups > 1:  # the heads that share a key become its queries: no copy of keys
        shape = query.shape
        query = query.reshape(shape[0], key.shape[1], groups, shape[3])
        output = _attend(query, key, value, mask, scaling, softcap).reshape(shape[0], shape[1], 1, -1)
    else:
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = _attend(query, key, value, mask, scaling, softcap)
    return output.transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=mask is None and query.shape[2] > 1
        )
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


AttentionInterface.register(ATTENTION, slot_attention)
