"""Row assignment of the KV window: a second, contiguous copy of the keys and values of decoding requests, on a CPU.

Attention on a CPU reads contiguous rows in place; out of blocks it would copy every key at every step. Rows are in
buckets of one length each, so that requests of similar length attend together; a request that outgrows its bucket moves
to one twice as long. Blocks remain the cache that is shared, found and freed: a row is filled from them once, when a
request begins to decode, and then grows by one token per step. A request without a row reads its blocks. No tensors
here: `kv_cache` has the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.inference.embedded.request import Request

MIN_ROW_TOKENS = 128
"""Length of the rows in the first bucket."""
ROW_INCREMENT = 8
"""Rows by which a bucket grows."""


class RowFill(NamedTuple):
    """A row that must be filled from its request's blocks."""

    row: int
    request: Request


class WindowBucket:
    """Rows of `length` tokens, used without gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = 0
        """Allocated rows; the bucket is dropped once it is empty."""
        self.requests: list[Request] = []
        """By row."""
        self.copies: list[tuple[int, int]] = []
        """(from, to): rows that must be copied before any is filled."""
        self.fills: list[RowFill] = []


class KVWindow:
    """Buckets by row length, with at most `budget` tokens in all rows; copies and fills are due after `arrange`."""

    def __init__(self, budget: int) -> None:
        self.buckets: dict[int, WindowBucket] = {}
        self._budget = budget
        self._resets: dict[Request, int] = {}
        """Each request's `resets` when its row was filled: after a reset the row is out of date."""

    def arrange(self, requests: Iterable[Request]) -> list[WindowBucket]:
        """Give rows to these requests only, within the budget, and return the buckets in use."""
        wanted = dict.fromkeys(requests)
        for bucket in self.buckets.values():
            self._evict(bucket, wanted)
        for request in wanted:
            if request not in self._resets:
                self._assign_row(request)
        self.buckets = {length: bucket for length, bucket in self.buckets.items() if bucket.requests}
        return list(self.buckets.values())

    def _assign_row(self, request: Request) -> None:
        length = max(MIN_ROW_TOKENS, 1 << (len(request.tokens) - 1).bit_length())
        bucket = self.buckets.get(length) or WindowBucket(length)
        if len(bucket.requests) == bucket.rows:
            used = sum(other.rows * other.length for other in self.buckets.values())
            if used + ROW_INCREMENT * length > self._budget:
                return
            bucket.rows += ROW_INCREMENT
        self.buckets[length] = bucket
        bucket.fills.append(RowFill(len(bucket.requests), request))
        bucket.requests.append(request)
        self._resets[request] = request.resets

    def _evict(self, bucket: WindowBucket, wanted: dict[Request, None]) -> None:
        """Remove requests that are not wanted, out of date or too long; the last rows fill the gaps."""
        bucket.copies, bucket.fills = [], []
        leaving = {
            row
            for row, request in enumerate(bucket.requests)
            if request not in wanted or self._resets[request] != request.resets or len(request.tokens) > bucket.length
        }
        if not leaving:
            return
        for row in leaving:
            del self._resets[bucket.requests[row]]
        count = len(bucket.requests) - len(leaving)
        gaps = [row for row in sorted(leaving) if row < count]
        movers = [row for row in range(count, len(bucket.requests)) if row not in leaving]
        bucket.copies = list(zip(movers, gaps, strict=True))
        for source, target in bucket.copies:
            bucket.requests[target] = bucket.requests[source]
        del bucket.requests[count:]
