"""Inputs of a decode step on a GPU: one row per request, staged in pinned memory that numpy writes.

A request keeps its row from step to step, so that its block table is written once; when a request leaves, the last row
takes its place. All inputs except block tables are one buffer, which one copy sends to the device.

Attention splits the requests' keys into items of about the same length, so that the whole GPU has work. The number of
items is fixed by the CUDA graph, and their length follows from the requests: many requests have one item each, few long
ones have many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.request import Request

UNUSED = -1
"""As a slot: nothing is stored. As an item's request: the item is skipped."""
MIN_ITEM_KEYS = 128
"""Keys of an item that is not a request's last: combining shorter ones costs more than it gains."""
ITEM_ALIGNMENT = 64
"""Item lengths are multiples of this."""
EXTRA_PROGRAMS = 2048
"""Programs of the attention kernel beyond one per request and head: enough for 100 and more multiprocessors."""


def max_items(requests: int, key_heads: int) -> int:
    return requests + max(1, EXTRA_PROGRAMS // key_heads)


def split_into_items(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Split requests with these numbers of keys into at most `limit` items.

    Returns [item, 4]: request, first key, the key after the last, whether it is the request's only item; and
    [request, 2]: its first item and how many it has.
    """
    requests = len(lengths)
    spare = limit - requests
    longest = max(MIN_ITEM_KEYS, -(-int(lengths.sum()) // spare))
    longest = -(-longest // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
    counts = -(-lengths // longest)
    firsts = np.cumsum(counts) - counts
    even = -(-lengths // (counts * ITEM_ALIGNMENT)) * ITEM_ALIGNMENT  # of all items of a request but its last
    owners = np.repeat(np.arange(requests), counts)
    begins = (np.arange(len(owners)) - firsts[owners]) * even[owners]
    ends = np.minimum(begins + even[owners], lengths[owners])
    items = np.stack([owners, begins, ends, counts[owners] == 1], 1)
    return items, np.stack([firsts, counts], 1)


class DecodeInputs:
    """Inputs of a step as tensors over one buffer, for `rows` requests and `items` items."""

    def __init__(self, buffer: Tensor, rows: int, items: int) -> None:
        self.buffer = buffer
        place = 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal place
            size = dtype.itemsize * int(np.prod(shape))
            taken = buffer[place : place + size].view(dtype).view(shape)
            place += -(-size // 16) * 16
            return taken.data  # not a view, to the compiler

        self.ids = take(torch.int64, rows)
        self.positions = take(torch.int64, rows)
        self.uniforms = take(torch.float64, rows)
        self.temperatures = take(torch.float32, rows)
        self.slots = take(torch.int32, rows)
        self.lengths = take(torch.int32, rows)
        self.spans = take(torch.int32, rows, 2)
        self.items = take(torch.int32, items, 4)

    @staticmethod
    def size(rows: int, items: int) -> int:
        """Return the bytes of the buffer, with alignment."""
        return rows * (3 * 8 + 5 * 4) + items * 16 + 8 * 16


class DecodeRows:
    """Rows of up to `count` requests with up to `blocks` blocks each."""

    def __init__(self, count: int, blocks: int, key_heads: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._max_items = max_items(count, key_heads)
        self._key_heads = key_heads
        size = DecodeInputs.size(count, self._max_items)
        self.staged = DecodeInputs(torch.zeros(size, dtype=torch.uint8, pin_memory=pinned), count, self._max_items)
        self.inputs = DecodeInputs(torch.zeros(size, dtype=torch.uint8, device=device), count, self._max_items)
        """The staged inputs on the device."""
        self._staged_tables = torch.zeros(count, blocks, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(count, blocks, dtype=torch.int32, device=device)
        self.requests: list[Request] = []
        """By row."""
        self._row: dict[Request, int] = {}
        self._wanted: Sequence[Request] = []
        self._held = [0] * count
        """Blocks written to each row's table."""
        self._resets = [0] * count
        """Each request's `resets` when its table was written."""
        self._is_changed = False
        """Whether the device's tables are out of date."""
        self._arrays = {name: tensor.numpy() for name, tensor in vars(self.staged).items() if name != "buffer"}
        self._table_array = self._staged_tables.numpy()

    def max_items(self, rows: int) -> int:
        return max_items(rows, self._key_heads)

    def arrange(self, requests: Sequence[Request], rows: int) -> None:
        """Assign rows to these requests only, and stage their next step for `rows` rows, the rest of them unused."""
        if requests != self._wanted:
            self._assign_rows(requests)
        self._write_tables()
        self._write_inputs(rows)

    def send(self) -> None:
        """Copy the staged inputs to the device."""
        self.inputs.buffer.copy_(self.staged.buffer, non_blocking=True)
        if self._is_changed:
            count = len(self.requests)
            self.tables[:count].copy_(self._staged_tables[:count], non_blocking=True)
            self._is_changed = False

    def _assign_rows(self, requests: Sequence[Request]) -> None:
        self._wanted = list(requests)
        wanted = set(requests)
        for request in [other for other in self.requests if other not in wanted]:
            row, last = self._row.pop(request), self.requests.pop()
            if last is not request:
                self.requests[row] = last
                self._row[last] = row
                self._resets[row] = -1  # rewrites its table
        for request in requests:
            if request not in self._row:
                self._row[request] = len(self.requests)
                self._resets[len(self.requests)] = -1
                self.requests.append(request)

    def _write_tables(self) -> None:
        held, resets = self._held, self._resets
        for row, request in enumerate(self.requests):
            blocks = request.blocks
            if resets[row] != request.resets:
                resets[row] = request.resets
                held[row] = 0
                self._arrays["temperatures"][row] = request.params.temperature
            if held[row] != len(blocks):
                self._table_array[row, held[row] : len(blocks)] = blocks[held[row] :]
                held[row] = len(blocks)
                self._is_changed = True

    def _write_inputs(self, rows: int) -> None:
        requests, arrays = self.requests, self._arrays
        count = len(requests)
        lengths = np.array([len(request.tokens) for request in requests], dtype=np.int64)
        positions = lengths - 1
        blocks = self._table_array[np.arange(count), positions // BLOCK_SIZE]
        items, spans = split_into_items(lengths, self.max_items(rows))
        for name, values, default in (
            ("ids", [request.tokens[-1] for request in requests], 0),
            ("positions", positions, 0),
            ("uniforms", [request.uniform() for request in requests], 0.0),
            ("slots", blocks * BLOCK_SIZE + positions % BLOCK_SIZE, UNUSED),
            ("lengths", lengths, 0),
            ("spans", spans, 0),
        ):
            arrays[name][:count] = values
            arrays[name][count:rows] = default
        arrays["temperatures"][count:rows] = 1.0
        arrays["items"][: len(items)] = items
        arrays["items"][len(items) : self.max_items(rows)] = UNUSED
