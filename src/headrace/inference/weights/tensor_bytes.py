"""Tensors as rows of bytes, for whoever carries them between processes: views, and a digest that a GPU can compute.

The digest tells whether bytes arrived as they left; it is no defence against somebody who means harm. It comes out the
same on every device and in any order of computation, within milliseconds on a GPU, where a cryptographic one would need
the bytes on a CPU first, and then about a second for each gigabyte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.transport.weights_link import TensorSpan

WORDS_AT_ONCE = 1 << 20
"""Words of eight bytes that a CPU mixes together: few enough for its cache."""
WORDS_ON_GPU = 1 << 22
"""Those of a GPU: the fewer the steps, the less Python has to do for it beside an engine that samples."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# The constants of splitmix64, as the signed numbers that torch computes with.
_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as a row of bytes, if it is in one piece; else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensors_in(row: Tensor, places: Iterable[TensorSpan]) -> dict[str, Tensor]:
    """The tensors that lie in a row of bytes, as views of it."""
    found = {}
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        end = place.offset + dtype.itemsize * math.prod(place.shape)
        found[place.name] = row[place.offset : end].view(dtype).view(place.shape)
    return found


def digest(row: Tensor) -> Tensor:
    """A number of 64 bits that changes when any of the bytes does; their count must be a multiple of eight.

    Each word is mixed with its place, and the results are summed. Returned as a tensor, so that a GPU need not be
    waited for.
    """
    words = row.view(torch.int64)
    at_once = min(WORDS_ON_GPU if row.is_cuda else WORDS_AT_ONCE, len(words))
    places = torch.arange(at_once, device=row.device) * _STEP
    mixing, shifting = torch.empty_like(places), torch.empty_like(places)
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    for start in range(0, len(words), at_once):
        part = words[start : start + at_once]
        mixed, shifted = mixing[: len(part)], shifting[: len(part)]
        torch.add(part, places[: len(part)], out=mixed)
        mixed += _signed(start * _STEP % (1 << 64))
        for factor in (_FIRST, _SECOND):  # products carry a change upward, shifts carry it downward
            torch.bitwise_right_shift(mixed, 32, out=shifted)
            shifted &= 0xFFFFFFFF
            mixed ^= shifted
            mixed *= factor
        total += mixed.sum()
    return total


def digests(row: Tensor, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Of each stretch of a row; a GPU is waited for once."""
    found: list[int] = torch.stack([digest(row[start:end]) for start, end in spans]).tolist()
    return found
