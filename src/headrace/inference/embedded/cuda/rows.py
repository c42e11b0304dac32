"""Inputs of a step on a GPU, staged in pinned memory that numpy writes: decode tokens and short prefills together.

Every request has a row. Its last token of the step is in that row, and all tokens of a prefill but the last are in rows
after those of the requests; so the first rows are the ones that are sampled. The tokens of a draft have rows after
those of the requests, with the same blocks, and are sampled, too. A request keeps its row from step to step,
and its block table is written once; when a request leaves, the last row takes its place. All inputs except block tables
are one buffer, which one copy sends to the device.

The token of a row may still be on the device: then `sources` has the row that sampled it in the last step.

Attention splits the keys of decode tokens into items of about the same length, so that the whole GPU has work. The
number of items is fixed by the CUDA graph, and their length follows from the requests: many requests have one item
each, few long ones have many. The longest requests come first, so that the last programs to start are short ones.
Prefills are split into tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.request import PENDING, SEED_MODULUS, Request

UNUSED = -1
"""As a slot: nothing is stored. As a request of an item or a tile: it is skipped. As a source: the id is staged."""
MIN_ITEM_KEYS = 128
"""Keys of an item that is not a request's last: combining shorter ones costs more than it gains."""
ITEM_ALIGNMENT = 64
"""Item lengths are multiples of this."""
EXTRA_PROGRAMS = 512
"""Programs of the attention kernel beyond one per request and head: about four for each multiprocessor. Combining the
results of more costs more than they gain (`benchmarks.inference.gpu_engine kernels`)."""
NOT_WRITTEN = (-1, 0)
MAX_PREFILLS = 256
"""Prefills of a step with other tokens."""


class PrefillRow(NamedTuple):
    """The tokens [start, end) of a request, at least one."""

    request: Request
    start: int
    end: int
    is_stored: bool = True
    """Whether its keys and values are stored; False if the request shares blocks that have them."""


def split_into_items(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Split requests with these numbers of keys into at most `limit` items, of which each has one or more.

    Returns [item, 5], those of the longest request first: request, first key, the key after the last, the request's
    first item, and how many it has.
    """
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    requests = len(lengths)
    spare = limit - requests
    longest = max(MIN_ITEM_KEYS, -(-int(lengths.sum()) // spare))
    longest = -(-longest // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
    counts = np.maximum(1, -(-lengths // longest))
    firsts = np.cumsum(counts) - counts
    even = -(-lengths // (counts * ITEM_ALIGNMENT)) * ITEM_ALIGNMENT  # of all items but the last
    owners = np.repeat(np.arange(requests), counts)
    begins = (np.arange(len(owners)) - firsts[owners]) * even[owners]
    ends = np.minimum(begins + even[owners], lengths[owners])
    return np.stack([order[owners], begins, ends, firsts[owners], counts[owners]], 1)


class StepInputs:
    """Inputs of a step as tensors over one buffer."""

    def __init__(self, buffer: Tensor, rows: int, tokens: int, items: int, tiles: int) -> None:
        self.buffer = buffer
        place = 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal place
            size = dtype.itemsize * int(np.prod(shape))
            taken = buffer[place : place + size].view(dtype).view(shape)
            place += -(-size // 16) * 16
            return taken.data  # not a view, to the compiler

        self.ids = take(torch.int64, tokens)
        self.positions = take(torch.int64, tokens)
        self.slots = take(torch.int32, tokens)
        self.sources = take(torch.int64, rows)
        self.uniforms = take(torch.float64, rows)
        self.temperatures = take(torch.float32, rows)
        self.is_masked = take(torch.int32, rows)
        self.lengths = take(torch.int32, rows)
        self.items = take(torch.int32, items, 5)
        self.tiles = take(torch.int32, tiles, 5)

    @staticmethod
    def size(rows: int, tokens: int, items: int, tiles: int) -> int:
        """Return the bytes of the buffer, with alignment."""
        return tokens * (2 * 8 + 4) + rows * (2 * 8 + 3 * 4) + (items + tiles) * 20 + 10 * 16


class StepRows:
    """Rows of up to `count` requests with up to `blocks` blocks each, in steps of up to `tokens` tokens."""

    def __init__(
        self,
        count: int,
        tokens: int,
        blocks: int,
        key_heads: int,
        tile_tokens: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed % SEED_MODULUS)
        """For requests without a seed."""
        pinned = device.type == "cuda"
        self.count = count
        self._key_heads = key_heads
        self._tile_tokens = tile_tokens
        sizes = (count, tokens, self.max_items(count), self.max_tiles(tokens))
        size = StepInputs.size(*sizes)
        self.staged = StepInputs(torch.zeros(size, dtype=torch.uint8, pin_memory=pinned), *sizes)
        self.inputs = StepInputs(torch.zeros(size, dtype=torch.uint8, device=device), *sizes)
        """The staged inputs on the device."""
        self._staged_tables = torch.zeros(count, blocks, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(count, blocks, dtype=torch.int32, device=device)
        self.requests: list[Request] = []
        """By row."""
        self.draft_rows: dict[Request, range] = {}
        """Of each request with a draft in the step."""
        self._row: dict[Request, int] = {}
        self._seeded: list[Request] = []
        """Those that have a seed."""
        self._sampled_rows = 0
        """Rows of requests and drafts in the step."""
        self._wanted: Sequence[Request] = []
        self._moved: dict[int, int] = {}
        """The row in the step before of each request that has moved to another one."""
        self._written = [NOT_WRITTEN] * count
        """The request's `resets` when each row's table was written, and how many blocks it has."""
        self._is_changed = False
        """Whether the device's tables are out of date."""
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        """The last copy to the device; staged memory must not change before it."""
        self._arrays = {name: tensor.numpy() for name, tensor in vars(self.staged).items() if name != "buffer"}
        self._table_array = self._staged_tables.numpy()

    def max_items(self, rows: int) -> int:
        return rows + max(1, EXTRA_PROGRAMS // self._key_heads)

    def max_tiles(self, tokens: int) -> int:
        return tokens // self._tile_tokens + min(MAX_PREFILLS, tokens // 2) + 1

    def arrange(
        self,
        decodes: Sequence[Request],
        prefills: Sequence[PrefillRow],
        tokens: int,
        drafts: Mapping[Request, Sequence[int]] = {},
    ) -> None:
        """Assign rows to these requests only, and stage their next step of `tokens` tokens, the rest of them unused.

        With drafts there are no prefills, and the last token of every request is known.
        """
        if self._sent is not None:
            self._sent.synchronize()
        requests = [*decodes, *(prefill.request for prefill in prefills)]
        self._moved.clear()
        if requests != self._wanted:
            self._assign_rows(requests)
        self._write_tables()
        self._write_inputs(prefills, min(tokens, self.count), tokens, drafts)

    def send(self) -> None:
        """Copy the staged inputs to the device."""
        self.inputs.buffer.copy_(self.staged.buffer, non_blocking=True)
        if self._is_changed:
            self.tables[: self._sampled_rows].copy_(self._staged_tables[: self._sampled_rows], non_blocking=True)
            self._is_changed = False
        if self._sent is not None:
            self._sent.record()

    def _assign_rows(self, requests: Sequence[Request]) -> None:
        """Give these requests rows, and take those of all others: the last row moves into each gap."""
        self._wanted = list(requests)
        wanted = set(requests)
        for request in [other for other in self.requests if other not in wanted]:
            row, last = self._row.pop(request), self.requests.pop()
            if last is not request:
                self.requests[row] = last
                self._moved[row] = self._moved.pop(self._row[last], self._row[last])
                self._row[last] = row
                self._written[row] = NOT_WRITTEN
        for request in requests:
            if request not in self._row:
                self._row[request] = len(self.requests)
                self._written[len(self.requests)] = NOT_WRITTEN
                self.requests.append(request)
        self._seeded = [request for request in requests if request.params.seed is not None]

    def _write_tables(self) -> None:
        """Stage the block tables that have changed."""
        written = self._written
        for row, request in enumerate(self.requests):
            blocks, (resets, held) = request.blocks, written[row]
            if resets != request.resets:
                held = 0
                self._arrays["temperatures"][row] = request.params.temperature
                self._arrays["is_masked"][row] = request.matcher is not None
            if held != len(blocks):
                self._table_array[row, held : len(blocks)] = blocks[held:]
                written[row] = request.resets, len(blocks)
                self._is_changed = True

    def _write_inputs(
        self, prefills: Sequence[PrefillRow], rows: int, tokens: int, drafts: Mapping[Request, Sequence[int]]
    ) -> None:
        """Stage all inputs of a step other than the block tables of requests."""
        requests, arrays = self.requests, self._arrays
        tokens_of = [request.tokens for request in requests]
        lengths, last = [*map(len, tokens_of)], [each[-1] for each in tokens_of]
        arrays["is_masked"][len(requests) : rows] = False
        self.draft_rows.clear()
        if drafts:
            self._place_drafts(drafts, lengths, last)
        ends, ids = np.array(lengths, dtype=np.int64), np.array(last, dtype=np.int64)
        self._sampled_rows = count = len(ends)
        sources = np.arange(count)
        for row, source in self._moved.items():
            if row < count:
                sources[row] = source
        sources[ids != PENDING] = UNUSED
        uniforms = self._random.random(count)
        for request in self._seeded:
            uniforms[self._row[request]] = request.uniform()
            for ahead, draft_row in enumerate(self.draft_rows.get(request, ()), 1):
                uniforms[draft_row] = request.uniform(ahead)
        keys = np.zeros(rows, dtype=np.int64)  # of decode tokens
        keys[:count] = ends
        unstored: list[int] = []
        used = count
        tiles: list[tuple[int, int, int, int, int]] = []
        for request, start, end, is_stored in prefills:
            row, length = self._row[request], end - start
            ids[row], ends[row], keys[row] = request.tokens[end - 1], end, end
            if not is_stored:
                unstored.append(row)
            if length > 1:
                keys[row] = 0
                before = np.arange(start, end - 1)
                own = slice(used, used + length - 1)
                arrays["ids"][own] = request.tokens[start : end - 1]
                arrays["positions"][own] = before
                arrays["slots"][own] = self._table_array[row, before // BLOCK_SIZE] * BLOCK_SIZE + before % BLOCK_SIZE
                tiles += [(row, first, length, start, used) for first in range(0, length, self._tile_tokens)]
                used += length - 1
        positions = ends - 1
        blocks = self._table_array[np.arange(count), positions // BLOCK_SIZE]
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        slots[unstored] = UNUSED
        items = split_into_items(keys, self.max_items(rows))
        for name, values, default in (
            ("sources", sources, UNUSED),
            ("uniforms", uniforms, 0.0),
            ("lengths", ends, 0),
        ):
            arrays[name][:count] = values
            arrays[name][count:rows] = default
        for name, values, default in (("ids", ids, 0), ("positions", positions, 0), ("slots", slots, UNUSED)):
            arrays[name][:count] = values
            arrays[name][used:tokens] = default
        arrays["temperatures"][count:rows] = 1.0
        arrays["items"][: len(items)] = items
        arrays["items"][len(items) : self.max_items(rows)] = UNUSED
        arrays["tiles"][: len(tiles)] = tiles or np.zeros((0, 5))
        arrays["tiles"][len(tiles) : self.max_tiles(tokens)] = UNUSED

    def _place_drafts(self, drafts: Mapping[Request, Sequence[int]], lengths: list[int], last: list[int]) -> None:
        """Give drafts rows after those of the requests, with their blocks and temperatures, and append their lengths
        and tokens."""
        own_rows: list[int] = []
        for request, draft in drafts.items():
            first, length = len(lengths), len(request.tokens)
            self.draft_rows[request] = range(first, first + len(draft))
            own_rows += [self._row[request]] * len(draft)
            lengths += range(length + 1, length + 1 + len(draft))
            last += draft
        added = slice(len(self.requests), len(lengths))
        self._table_array[added] = self._table_array[own_rows]
        self._arrays["temperatures"][added] = self._arrays["temperatures"][own_rows]
        self._is_changed = True
