"""Buffers for new weights: staging memory until they are installed, copies, tensors as bytes, and digests of bytes.

A digest detects damage, not manipulation. It is the same on every device and in any order of computation, and takes
milliseconds on a GPU; a cryptographic one would need the bytes on a CPU, and about a second per gigabyte.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from headrace.transport.weights_link import TensorSpan

log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_PLAIN_COPY = 16 << 20
"""Bytes of tensors within a GPU that are copied one by one. Torch's joint kernel has two thirds of the speed, but saves
calls."""
DIGEST_WORDS = 1 << 20
"""Words of eight bytes that are mixed at once: few enough for the cache of a CPU."""


def stage(device: torch.device, size: int, make: Callable[[torch.device], T]) -> T:
    """Return `make(device)`, which allocates about `size` bytes: on an engine's GPU if they fit, else on the host.

    Installing from the GPU takes milliseconds. A trainer on the same GPU may take free memory at any moment; then the
    host is used.
    """
    if device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(device)[0]:
        try:
            return make(device)
        except RuntimeError as error:
            # cuBLAS allocates its own memory once, and raises another error.
            if not isinstance(error, torch.OutOfMemoryError) and "cublasCreate" not in str(error):
                raise
            log.info("new weights are staged on the host: the GPU is out of memory: %s", error)
        free_staging(device)  # outside of `except`: the error keeps the tensors alive
    return make(torch.device("cpu"))


def free_staging(device: torch.device) -> None:
    """Return the memory of installed weights to the GPU, which torch would keep."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copy tensors in place, pairs of target and source; return the end of the copies if they are queued on a GPU."""
    small = [pair for pair in pairs if pair[0].nbytes < MIN_PLAIN_COPY]
    if small:
        targets, sources = zip(*small, strict=True)
        torch._foreach_copy_(targets, sources)
    for target, source in pairs:
        if target.nbytes >= MIN_PLAIN_COPY:
            target.copy_(source)
    device = pairs[0][0].device if pairs else None
    if device is None or device.type != "cuda":
        return None
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    return copied


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as a row of bytes; a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def view_tensors(row: Tensor, places: Iterable[TensorSpan]) -> dict[str, Tensor]:
    """Return the tensors in a row of bytes by name, as views."""
    tensors = {}
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        end = place.offset + dtype.itemsize * math.prod(place.shape)
        tensors[place.name] = row[place.offset : end].view(dtype).view(place.shape)
    return tensors


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


MIXING = tuple(map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
"""The constants of splitmix64, as the signed numbers that torch computes with: of a position, and two factors."""


def digest(row: Tensor) -> Tensor:
    """Return a 64-bit digest of a row of bytes, whose length must be a multiple of eight.

    Each word is mixed with its position, and the results are summed. The result is a tensor, to avoid a
    synchronization with the GPU.
    """
    words = row.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    if row.is_cuda:
        with torch.cuda.device(row.device):
            add_digest = compiled_digest(row.device)
            if add_digest is not None:
                add_digest(words, total, *MIXING)
                return total
    step, *factors = MIXING
    at_once = min(DIGEST_WORDS, len(words))
    positions = torch.arange(at_once, device=row.device) * step
    mixing, shifting = torch.empty_like(positions), torch.empty_like(positions)
    for start in range(0, len(words), at_once):
        part = words[start : start + at_once]
        mixed, shifted = mixing[: len(part)], shifting[: len(part)]
        torch.add(part, positions[: len(part)], out=mixed)
        mixed += _signed(start * step % (1 << 64))
        for factor in factors:  # products carry a change upward, shifts carry it downward
            torch.bitwise_right_shift(mixed, 32, out=shifted)
            shifted &= 0xFFFFFFFF
            mixed ^= shifted
            mixed *= factor
        total += mixed.sum()
    return total


@cache
def compiled_digest(device: torch.device) -> Callable[..., None] | None:
    """Return `add_digest` if it works on the current device: it needs Triton and a C compiler, which torch does not."""
    try:
        from headrace.inference.weights.digest_kernel import add_digest

        words, total = (torch.zeros(count, dtype=torch.int64, device=device) for count in (16, 1))
        add_digest(words, total, *MIXING)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.warning("digests of weights are computed by torch, which takes longer: %s", error)
        return None
    return add_digest


def digests(row: Tensor, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return the digest of each span of a row, with one synchronization."""
    values: list[int] = torch.stack([digest(row[start:end]) for start, end in spans]).tolist()
    return values
