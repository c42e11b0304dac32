"""The weights of one version, copied out of the trainer's way: buckets of bytes in the memory of the host.

On a GPU that engines share a version is laid out in memory that they can open as well (`shared_row`); then it reaches
the host while training goes on, for whoever comes when the next version has taken its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.inference.weights.buffers import as_bytes, digest
from headrace.trainer.shared_row import SharedRow
from headrace.transport.weights_link import ALIGNMENT_BYTES, TensorSpan

BUCKET_SIZE = 1 << 26
"""Bytes that travel at once. A power of two, since torch rounds pinned memory up to one."""


class Snapshot(NamedTuple):
    """The tensors of one version, as a row of bytes in the memory of this host."""

    places: list[TensorSpan]
    buckets: list[Tensor]
    """What they hold can be relied on after `wait`."""
    digests: list[int]
    row: SharedRow | None = None
    """Where else they are, for as long as it holds this snapshot."""
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until the buckets are there."""
        if self.copied is not None:
            self.copied.synchronize()

    def lent(self) -> contextlib.AbstractContextManager[str | None]:
        """What opens the memory of the GPU that has it, while the context lasts; None if none has."""
        return contextlib.nullcontext() if self.row is None else self.row.lent(self.buckets)


def take_snapshot(
    tensors: Iterable[tuple[str, Tensor]], bucket_size: int = BUCKET_SIZE, row: SharedRow | None = None
) -> Snapshot:
    """Copy tensors, one after the other, as they are: whole, and in the type that engines want.

    `row` must be vacant, and have room for all of them (`size_of`).
    """
    places = []
    filling: _Filling | None = None
    for name, tensor in tensors:
        filling = filling or _Filling(bucket_size, tensor.device, row)
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorSpan(name, dtype, list(tensor.shape), filling.size))
        filling.append(as_bytes(tensor))
    if filling is None:
        raise ValueError("there are no tensors to publish")
    buckets, digests, copied = filling.finish()
    if row is not None:
        row.fill(buckets)
    return Snapshot(places, buckets, digests, row, copied)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of a row of them."""
    return sum(tensor.nbytes + -tensor.nbytes % ALIGNMENT_BYTES for tensor in tensors)


class _Filling:
    """A row of bytes that grows, bucket by bucket. A bucket is filled where the tensors are, then kept on the host."""

    def __init__(self, bucket_size: int, device: torch.device, row: SharedRow | None) -> None:
        self.size = 0
        self._bucket_size = bucket_size
        self._device = device
        self._row = row
        self._open: Tensor | None = None
        self._used = 0
        self._buckets: list[Tensor] = []
        self._digests: list[Tensor] = []

    def append(self, content: Tensor) -> None:
        """Add bytes, and zeros up to the next place where a tensor may begin."""
        padding = -len(content) % ALIGNMENT_BYTES
        self.size += len(content) + padding
        while len(content):
            room = self._room()
            piece = content[: len(room)]
            room[: len(piece)].copy_(piece)
            self._advance(len(piece))
            content = content[len(piece) :]
        if padding:
            self._room()[:padding].zero_()
            self._advance(padding)

    def finish(self) -> tuple[list[Tensor], list[int], torch.cuda.Event | None]:
        """The buckets, their digests, and what comes once the buckets are on the host, if that is not now."""
        if self._open is not None:
            self._seal(self._open[: self._used])
        copied = None
        if self._row is not None and self._row.stream is not None:
            copied = self._row.stream.record_event()
        digests: list[int] = torch.stack(self._digests).tolist()  # waits until all is written
        return self._buckets, digests, copied

    def _room(self) -> Tensor:
        """What is left of the bucket that is being filled."""
        if self._open is None:
            self._open, self._used = self._new_bucket(), 0
        return self._open[self._used :]

    def _new_bucket(self) -> Tensor:
        if self._row is None:
            return torch.empty(self._bucket_size, dtype=torch.uint8, device=self._device)
        start = self._bucket_size * len(self._buckets)
        if start >= len(self._row.bytes):
            raise ValueError(f"the tensors do not fit into the {len(self._row.bytes)} bytes of the row")
        return self._row.bytes[start : start + self._bucket_size]

    def _advance(self, count: int) -> None:
        self._used += count
        if self._open is not None and self._used == len(self._open):
            self._seal(self._open)

    def _seal(self, full: Tensor) -> None:
        self._buckets.append(self._on_host(full))
        self._digests.append(digest(full))
        self._open = None

    def _on_host(self, full: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return full if self._row is None else full.clone()
        kept = torch.empty(len(full), dtype=torch.uint8, pin_memory=True)
        current = torch.cuda.current_stream(self._device)
        beside = None if self._row is None else self._row.stream
        with torch.cuda.stream(beside or current):
            if beside is not None:
                beside.wait_stream(current)
            kept.copy_(full, non_blocking=True)
        return kept
