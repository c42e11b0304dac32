"""Who has which row of the arrays that a decoding step reads, and what these hold. Pinned memory, seen through numpy.

A request keeps its row from step to step, so that its blocks are written once and not at every step; where one leaves,
the last takes its place. Everything but the tables of blocks is one buffer: one copy takes a step to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.cuda.items import cut, room_for_items
from headrace.inference.embedded.request import Request

NOBODY = -1
"""As a slot: nothing is stored. As an item's request: there is nothing to do."""


class Inputs:
    """What one step reads, as tensors over one buffer: `rows` requests, and the items that their keys are cut into."""

    def __init__(self, buffer: Tensor, rows: int, items: int) -> None:
        self.buffer = buffer
        place = 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal place
            size = dtype.itemsize * int(np.prod(shape))
            taken = buffer[place : place + size].view(dtype).view(shape)
            place += -(-size // 16) * 16
            return taken.data  # to a compiler it is no view of anything

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
        """Bytes, with what aligns them."""
        return rows * (3 * 8 + 5 * 4) + items * 16 + 8 * 16


class Rows:
    """The rows of up to `count` requests with up to `blocks` blocks each."""

    def __init__(self, count: int, blocks: int, key_heads: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._room = room_for_items(count, key_heads)
        self._key_heads = key_heads
        size = Inputs.size(count, self._room)
        self.staged = Inputs(torch.zeros(size, dtype=torch.uint8, pin_memory=pinned), count, self._room)
        self.inputs = Inputs(torch.zeros(size, dtype=torch.uint8, device=device), count, self._room)
        """The same on the device."""
        self._staged_tables = torch.zeros(count, blocks, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(count, blocks, dtype=torch.int32, device=device)
        self.requests: list[Request] = []
        """By row."""
        self._row: dict[Request, int] = {}
        self._wanted: Sequence[Request] = []
        self._held = [0] * count
        """Blocks of each row's table."""
        self._losses = [0] * count
        """How often its request had lost its blocks when they were written."""
        self._is_changed = False
        """Whether the device's tables are older than those here."""
        self._arrays = {name: tensor.numpy() for name, tensor in vars(self.staged).items() if name != "buffer"}
        self._table_array = self._staged_tables.numpy()

    def room(self, rows: int) -> int:
        """Items for that many rows."""
        return room_for_items(rows, self._key_heads)

    def arrange(self, requests: Sequence[Request], rows: int) -> None:
        """Give these requests alone rows, and stage their next step for `rows` of them; those beyond are nobody's."""
        if requests != self._wanted:
            self._seat(requests)
        self._write_tables()
        self._write_inputs(rows)

    def send(self) -> None:
        """Bring what is staged to the device."""
        self.inputs.buffer.copy_(self.staged.buffer, non_blocking=True)
        if self._is_changed:
            count = len(self.requests)
            self.tables[:count].copy_(self._staged_tables[:count], non_blocking=True)
            self._is_changed = False

    def _seat(self, requests: Sequence[Request]) -> None:
        self._wanted = list(requests)
        wanted = set(requests)
        for request in [other for other in self.requests if other not in wanted]:
            row, last = self._row.pop(request), self.requests.pop()
            if last is not request:
                self.requests[row] = last
                self._row[last] = row
                self._losses[row] = -1  # its table is written anew
        for request in requests:
            if request not in self._row:
                self._row[request] = len(self.requests)
                self._losses[len(self.requests)] = -1
                self.requests.append(request)

    def _write_tables(self) -> None:
        held, losses = self._held, self._losses
        for row, request in enumerate(self.requests):
            blocks = request.blocks
            if losses[row] != request.losses:
                losses[row] = request.losses
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
        blocks = self._table_array[np.arange(count), positions // BLOCK]
        items, spans = cut(lengths, self.room(rows))
        for name, values, nothing in (
            ("ids", [request.tokens[-1] for request in requests], 0),
            ("positions", positions, 0),
            ("uniforms", [request.uniform() for request in requests], 0.0),
            ("slots", blocks * BLOCK + positions % BLOCK, NOBODY),
            ("lengths", lengths, 0),
            ("spans", spans, 0),
        ):
            arrays[name][:count] = values
            arrays[name][count:rows] = nothing
        arrays["temperatures"][count:rows] = 1.0
        arrays["items"][: len(items)] = items
        arrays["items"][len(items) : self.room(rows)] = NOBODY
