"""The keys of a step's requests, cut into items of about the same length, so that all of the GPU has work. No torch.

How many items there are room for is fixed, since a graph is; how long they are follows from the lengths: many requests
are an item each, few long ones many.
"""

from __future__ import annotations

import numpy as np

SHORTEST = 128
"""Keys of an item that is not a request's last: below that, putting together costs more than it gains."""
STEP = 64
"""What an item's length is a multiple of."""
PROGRAMS = 2048
"""Of the attention kernel, beside one per request and head: enough for a GPU of a hundred and more processors."""


def room_for_items(requests: int, key_heads: int) -> int:
    return requests + max(1, PROGRAMS // key_heads)


def cut(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """([item, 4], [request, 2]): request, first key, the key after the last, whether it is the only one; and for each
    request its first item and how many it has. There are at most `room` items."""
    requests = len(lengths)
    spare = room - requests
    longest = max(SHORTEST, -(-int(lengths.sum()) // spare))
    longest = -(-longest // STEP) * STEP
    counts = -(-lengths // longest)
    firsts = np.cumsum(counts) - counts
    even = -(-lengths // (counts * STEP)) * STEP  # the same for all items of a request but its last
    owners = np.repeat(np.arange(requests), counts)
    begins = (np.arange(len(owners)) - firsts[owners]) * even[owners]
    ends = np.minimum(begins + even[owners], lengths[owners])
    items = np.stack([owners, begins, ends, counts[owners] == 1], 1)
    return items, np.stack([firsts, counts], 1)
