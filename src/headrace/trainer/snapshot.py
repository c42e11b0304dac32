"""Snapshots: the weights of one version as buckets of bytes in host memory, and the GPU buffer shared with engines.

On a GPU that engines share, a version is also written to a buffer that they open by CUDA IPC. It is copied to the host
asynchronously, for engines that fetch it after the next version has replaced it in the buffer. The buffer is either
written or read. An engine reads for milliseconds; the trainer waits up to `READERS_TIMEOUT_S` for readers before it
writes the next version. If that is not enough, the version is not written there and engines fetch it from the host: no
engine blocks training, and none copies a mix of two versions. A second buffer would cost two more bytes per parameter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.inference.cuda_driver import ExportedMemory
from headrace.inference.weights.buffers import as_bytes, digest
from headrace.trainer.host_copies import BUCKET_BYTES
from headrace.transport.weights_link import ALIGNMENT_BYTES, TensorSpan

READERS_TIMEOUT_S = 0.5


class Snapshot(NamedTuple):
    """The tensors of one version as consecutive bytes in host memory."""

    spans: list[TensorSpan]
    buckets: list[Tensor]
    """Valid after `wait`."""
    digests: list[int]
    buffer: SharedBuffer | None = None
    """GPU memory that also has them until the next version is written."""
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the buckets are copied."""
        if self.copied is not None:
            self.copied.synchronize()

    def lend(self) -> contextlib.AbstractContextManager[str | None]:
        """Yield the IPC handle of GPU memory with this version inside the context; None if there is none."""
        return contextlib.nullcontext() if self.buffer is None else self.buffer.lend(self.buckets)


def take_snapshot(
    tensors: Iterable[tuple[str, Tensor]], bucket_size: int = BUCKET_BYTES, buffer: SharedBuffer | None = None
) -> Snapshot:
    """Copy tensors, which must be full and in the dtype of engines.

    `buffer` must be writable and have room for all of them (`size_of`).
    """
    spans = []
    writer: _BucketWriter | None = None
    for name, tensor in tensors:
        writer = writer or _BucketWriter(bucket_size, tensor.device, buffer)
        dtype = str(tensor.dtype).removeprefix("torch.")
        spans.append(TensorSpan(name, dtype, list(tensor.shape), writer.size))
        writer.append(as_bytes(tensor))
    if writer is None:
        raise ValueError("there are no tensors to publish")
    buckets, digests, copied = writer.finish()
    if buffer is not None:
        buffer.end_write(buckets)
    return Snapshot(spans, buckets, digests, buffer, copied)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors with alignment."""
    return sum(tensor.nbytes + -tensor.nbytes % ALIGNMENT_BYTES for tensor in tensors)


class _BucketWriter:
    """Concatenates bytes into buckets. A bucket is filled on the tensors' device, then copied to the host."""

    def __init__(self, bucket_size: int, device: torch.device, buffer: SharedBuffer | None) -> None:
        self.size = 0
        self._bucket_size, self._device, self._buffer = bucket_size, device, buffer
        self._open: Tensor | None = None
        self._used = 0
        self._buckets: list[Tensor] = []
        self._digests: list[Tensor] = []

    def append(self, content: Tensor) -> None:
        """Add bytes, and zeros up to the alignment of the next tensor."""
        padding = content.new_zeros(-len(content) % ALIGNMENT_BYTES)
        self.size += len(content) + len(padding)
        for left in (content, padding):
            while len(left):
                if self._open is None:
                    self._open, self._used = self._new_bucket(), 0
                free = self._open[self._used :]
                piece = left[: len(free)]
                free[: len(piece)].copy_(piece)
                self._used += len(piece)
                if self._used == len(self._open):
                    self._close_bucket(self._open)
                left = left[len(piece) :]

    def finish(self) -> tuple[list[Tensor], list[int], torch.cuda.Event | None]:
        """Return buckets, digests, and the event of an asynchronous copy to the host, if any."""
        if self._open is not None:
            self._close_bucket(self._open[: self._used])
        copied = None
        if self._buffer is not None and self._buffer.stream is not None:
            copied = self._buffer.stream.record_event()
        digests: list[int] = torch.stack(self._digests).tolist()  # waits until all bytes are written
        return self._buckets, digests, copied

    def _new_bucket(self) -> Tensor:
        if self._buffer is None:
            return torch.empty(self._bucket_size, dtype=torch.uint8, device=self._device)
        start, content = self._bucket_size * len(self._buckets), self._buffer.bytes
        if start >= len(content):
            raise ValueError(f"the tensors do not fit into the {len(content)} bytes of the shared buffer")
        return content[start : start + self._bucket_size]

    def _close_bucket(self, full: Tensor) -> None:
        self._buckets.append(self._copy_to_host(full))
        self._digests.append(digest(full))
        self._open = None

    def _copy_to_host(self, full: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return full if self._buffer is None else full.clone()
        # Always as large, so that the memory of another bucket is used again.
        host = torch.empty(self._bucket_size, dtype=torch.uint8, pin_memory=True)[: len(full)]
        current = torch.cuda.current_stream(self._device)
        copying = None if self._buffer is None else self._buffer.stream
        with torch.cuda.stream(copying or current):
            if copying is not None:
                copying.wait_stream(current)
            host.copy_(full, non_blocking=True)
        return host


class SharedBuffer:
    """The buffer: the trainer's thread writes it, the threads that serve engines lend it to readers.

    Its memory lives as long as this process: an engine may still have it open after its connection is closed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = ExportedMemory(size, device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The stream that copies it to the host during training."""
        self._changed = threading.Condition()
        self._content: object | None = None
        self._readers = 0

    @property
    def bytes(self) -> Tensor:
        return self._memory.bytes

    def begin_write(self) -> bool:
        """Wait for readers; return whether there are none. If so, there are no new readers until `end_write`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._readers, READERS_TIMEOUT_S):
                return False
            self._content = None
        if self.stream is not None:
            self.stream.synchronize()  # the copy of the last version began a step ago
        return True

    def end_write(self, content: object) -> None:
        """Make the written content available to readers of `content`."""
        with self._changed:
            self._content = content

    @contextlib.contextmanager
    def lend(self, content: object) -> Iterator[str | None]:
        """Yield the IPC handle, hexadecimal, to read `content` inside the context; None if it has other content."""
        with self._changed:
            is_here = self._content is content
            self._readers += is_here
        try:
            yield self._memory.handle.hex() if is_here else None
        finally:
            with self._changed:
                self._readers -= is_here
                self._changed.notify_all()
