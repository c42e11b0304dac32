"""The digest of `buffers` as one kernel, which reads every byte once; torch's own operations need twelve passes.

Imported only on a GPU: triton comes with torch for GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS = 2048
TILES = 8
"""Tiles of a program: fewer programs add to the result."""


def add_digest(words: Tensor, total: Tensor, step: int, first: int, second: int) -> None:
    """Add the digest of 64-bit words to a number on their GPU, which is the current one; with `buffers.MIXING`."""
    programs = triton.cdiv(len(words), TILE_WORDS * TILES)
    constants = {"STEP": step, "FIRST": first, "SECOND": second}
    _add_digest[(programs,)](words, total, len(words), **constants, TILE=TILE_WORDS, TILES=TILES)


@triton.jit  # type: ignore[untyped-decorator]
def _add_digest(  # type: ignore[no-untyped-def]
    words,
    total,
    count,
    STEP: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    SECOND: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
):
    start = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    added = tl.zeros([TILE], dtype=tl.int64)
    for number in range(TILES):
        place = start + number * TILE + tl.arange(0, TILE)
        mixed = tl.load(words + place, mask=place < count, other=0) + place * STEP
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * FIRST
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * SECOND
        added += tl.where(place < count, mixed, 0)
    tl.atomic_add(total, tl.sum(added, 0), sem="relaxed")
