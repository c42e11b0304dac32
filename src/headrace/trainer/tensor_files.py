"""Safetensors files of sharded tensors, written and read in blocks through a bounded number of host buffers.

A file has the shards of one rank with their offsets in the full tensors, in the format of torch.distributed.checkpoint
(HuggingFaceStorageWriter), which any number of ranks can read. That writer is not used because it copies the tensors
twice in host memory and serializes them a third time; here a block is copied once, to pinned memory, and written from
there. Tensors are sharded by rows, as FSDP does.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.inference.weights.buffers import as_bytes
from headrace.rollout.digest import digest_of
from headrace.rollout.schema import DamagedFile
from headrace.trainer.host_copies import BUCKET_BYTES
from headrace.transport.checkpoint_files import (
    PART_BYTES,
    READER_THREADS,
    XXH3,
    BlockDigests,
    block_spans,
    read_into,
    read_parts,
)

WRITER_THREADS = min(8, max(2, (os.cpu_count() or 2) // 2))
"""Half of the cores are left to others."""
HEADER_ALIGNMENT_BYTES = 64
_LENGTH = struct.Struct("<Q")
_SHARDING = "DCP_SHARDING_INFO"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Shard(NamedTuple):
    """The rows of a tensor that a rank has: from `origin` on, of `rows` in all; a scalar has one row."""

    name: str
    local: Tensor
    origin: int
    rows: int


def local_shards(tensors: Mapping[str, Tensor], *, with_whole: bool = True) -> list[Shard]:
    """Return this rank's shards; `with_whole`: also the tensors that every rank has whole."""
    shards = []
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        if not isinstance(tensor, DTensor):
            shards += [Shard(name, tensor, 0, rows)] if with_whole else []
            continue
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(shape[1:]) != tuple(tensor.shape[1:]):
            raise ValueError(f"{name} is sharded by another dimension than its rows")
        if shape[0]:
            shards.append(Shard(name, tensor.to_local(), offset[0], rows))
    return shards


def _find_device(shards: Iterable[Shard]) -> torch.device:
    """Return the GPU of the shards, or the CPU if all are there."""
    return next((shard.local.device for shard in shards if shard.local.is_cuda), torch.device("cpu"))


def _make_threads(count: int, device: torch.device) -> ThreadPoolExecutor:
    """Return threads that use this GPU: in a new thread, CUDA would start to use the first one."""
    name = "tensor-file"
    if device.type != "cuda":
        return ThreadPoolExecutor(count, name)
    return ThreadPoolExecutor(count, name, initializer=torch.cuda.set_device, initargs=(device,))


class TensorFileWriter:
    """Writes one file in blocks by background threads, from host memory of at most `blocks` blocks; None: of all.

    `append` waits while all of them are in use. With `durable`, a block is on the disk and out of the page cache before
    its memory is used again, and has a digest.
    """

    def __init__(
        self,
        path: Path,
        content: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        device: torch.device,
        blocks: int | None,
        durable: bool,
    ) -> None:
        """`content`: names, dtypes and shapes of the tensors, in the order in which their bytes will be appended.

        `device` is that of the tensors; with several, the GPU.
        """
        header = _encode_header(content, metadata or {})
        self.path, self._durable, self._header_digest = path, durable, digest_of(header)
        self._left = len(header) + sum(tensor.nbytes for tensor in content.values())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._threads = _make_threads(WRITER_THREADS, device)
        self._blocks: SimpleQueue[Tensor | None] = SimpleQueue()
        """Blocks that may be filled; None: one that is not allocated yet."""
        for _ in range(blocks or -(-self._left // BUCKET_BYTES)):
            self._blocks.put(None)
        self._pinned = device.type == "cuda"
        self._open: Tensor | None = None
        self._used = 0
        self._written = 0
        self._writes: list[Future[str]] = []
        self.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def append(self, content: Tensor) -> None:
        """Copy the bytes of the next tensor, asynchronously from a GPU: in the order of its current stream."""
        left = as_bytes(content)
        while len(left):
            block = self._open_block()
            free = block[self._used :]
            piece = left[: len(free)]
            free[: len(piece)].copy_(piece, non_blocking=True)
            left = left[len(piece) :]
            self._used += len(piece)
            if self._used == len(block):
                copied = torch.cuda.current_stream().record_event() if self._pinned else None
                self._writes.append(self._threads.submit(self._write, block, self._written, copied))
                self._written += len(block)
                self._open = None

    @property
    def is_done(self) -> bool:
        """Whether all blocks are written, or one has failed."""
        return all(write.done() for write in self._writes)

    def finish(self) -> BlockDigests:
        """Wait until the file is complete."""
        try:
            digests = [write.result() for write in self._writes]
            if self._left or self._open is not None:
                raise ValueError("the tensors have fewer bytes than the header says")
            if self._durable:
                os.fsync(self._file)
        finally:
            self._threads.shutdown()
            os.close(self._file)
        return BlockDigests(self._written, BUCKET_BYTES, digests, XXH3, self._header_digest)

    def _open_block(self) -> Tensor:
        """Return the block that is being filled; if there is none, wait for a free one."""
        if self._open is None:
            size = min(BUCKET_BYTES, self._left)
            if not size:
                raise ValueError("the tensors have more bytes than the header says")
            free = self._blocks.get()
            if free is None:  # pinned memory is requested in buckets of one size, and used again
                free = torch.empty(BUCKET_BYTES if self._pinned else size, dtype=torch.uint8, pin_memory=self._pinned)
            self._open = free[:size]  # a smaller block is the last one
            self._used = 0
            self._left -= size
        return self._open

    def _write(self, block: Tensor, start: int, copied: torch.cuda.Event | None) -> str:
        """Write a block at `start`, and free it; return its digest if the file is durable."""
        try:
            if copied is not None:
                copied.synchronize()
            content = block.numpy().data
            left, offset = content, start
            while len(left):
                count = os.pwrite(self._file, left, offset)
                left, offset = left[count:], offset + count
            if not self._durable:
                return ""
            os.fdatasync(self._file)
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self._file, start, len(content), os.POSIX_FADV_DONTNEED)
            return digest_of(content)
        except OSError as error:
            error.filename = str(self.path)
            raise
        finally:
            self._blocks.put(block)


def write_shards(path: Path, shards: Sequence[Shard], *, blocks: int | None) -> TensorFileWriter:
    """Start to write shards durably; they may change after the return."""
    ordered = sorted(shards, key=lambda shard: -shard.local.itemsize)  # so that each is aligned to its own size
    offsets = {
        shard.name: {"saved_offsets": [shard.origin, *[0] * (shard.local.ndim - 1)] if shard.local.ndim else []}
        for shard in ordered
    }
    metadata = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
    content = {shard.name: shard.local for shard in ordered}
    writer = TensorFileWriter(path, content, metadata, device=_find_device(shards), blocks=blocks, durable=True)
    for tensor in content.values():
        writer.append(tensor)
    return writer


def _encode_header(content: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in content.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-(_LENGTH.size + len(encoded)) % HEADER_ALIGNMENT_BYTES)
    return _LENGTH.pack(len(encoded)) + encoded


class SavedShard(NamedTuple):
    """A shard in a file, whose bytes begin at `start`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: int
    start: int

    @property
    def end_row(self) -> int:
        return self.origin + (self.shape[0] if self.shape else 1)


def read_shards(path: Path, digests: BlockDigests | None = None) -> list[SavedShard]:
    """Return the shards of a file from its header. Raises `DamagedFile`, also if that differs from its digest."""
    if not path.is_file():
        raise DamagedFile("missing, or not a regular file", file=path)
    try:
        with open(path, "rb") as file:
            (length,) = _LENGTH.unpack(start := file.read(_LENGTH.size))
            size = os.fstat(file.fileno()).st_size
            if length > size:
                raise ValueError("its header is cut off")
            content = file.read(length)
        if digests is not None:
            if digests.header:
                is_whole = digest_of(start + content) == digests.header
            else:  # of an older version: the first block contains it
                is_whole = digests.matches(0, read_parts(path, 0, min(digests.size, digests.block_size)))
            if not is_whole:
                raise ValueError("its header differs from what was written")
        header = json.loads(content)
        metadata = header.pop("__metadata__", {})
        offsets = json.loads(metadata[_SHARDING]) if _SHARDING in metadata else {}
        shards, end = [], 0
        for name, entry in header.items():
            origin = offsets[name]["saved_offsets"] if name in offsets else []
            if any(origin[1:]):
                raise ValueError(f"{name} is sharded by another dimension than its rows")
            start, shape = _LENGTH.size + length + entry["data_offsets"][0], tuple(entry["shape"])
            shards.append(SavedShard(path, name, entry["dtype"], shape, origin[0] if origin else 0, start))
            end = max(end, entry["data_offsets"][1])
        if size != _LENGTH.size + length + end:
            raise ValueError(f"it has {size} bytes instead of {_LENGTH.size + length + end}")
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise DamagedFile(f"damaged: {error}", file=path) from error
    return shards


class _Piece(NamedTuple):
    """Bytes of a tensor in memory, and where they begin in a file."""

    start: int
    target: Tensor


def load_shards(saved: Iterable[SavedShard], shards: Sequence[Shard], digests: Mapping[str, BlockDigests]) -> None:
    """Read shards in place. Raises `DamagedFile` if a block that is read differs from the digests of its file, if any.

    Raises ValueError if a tensor is missing or of another shape or type.
    """
    by_name: dict[str, list[SavedShard]] = {}
    for entry in saved:
        by_name.setdefault(entry.name, []).append(entry)
    pieces: dict[Path, list[_Piece]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for shard in shards:
        if not shard.local.is_contiguous():
            copies.append((shard.local, shard.local.contiguous()))
            shard = shard._replace(local=copies[-1][1])
        for path, piece in _find_pieces(shard, by_name.get(shard.name, [])):
            pieces.setdefault(path, []).append(piece)
    with _BlockReader(_find_device(shards)) as reader:
        for path, parts in pieces.items():
            reader.read(path, parts, digests.get(path.name))
    for local, contiguous in copies:
        local.copy_(contiguous)


def _find_pieces(shard: Shard, entries: Sequence[SavedShard]) -> list[tuple[Path, _Piece]]:
    """Return the parts of a shard in memory that are in the saved entries, which must cover it."""
    local, row_shape, dtype = shard.local, tuple(shard.local.shape[1:]), _DTYPES[shard.local.dtype]
    for entry in entries:
        if (entry.shape[1:], entry.dtype, len(entry.shape)) != (row_shape, dtype, local.ndim):
            has = f"{list(entry.shape)} {entry.dtype}"
            raise ValueError(f"{shard.name} is {has}, but {list(local.shape)} {dtype} in this run")
    if (rows := max((entry.end_row for entry in entries), default=0)) != shard.rows:
        raise ValueError(f"{shard.name} has {rows} rows instead of {shard.rows}")
    row_bytes = local.dtype.itemsize * math.prod(row_shape)
    content, end = as_bytes(local), shard.origin + (local.shape[0] if local.ndim else 1)
    pieces, covered = [], 0
    for entry in entries:
        first, last = max(entry.origin, shard.origin), min(entry.end_row, end)
        if first < last:
            target = content[(first - shard.origin) * row_bytes : (last - shard.origin) * row_bytes]
            pieces.append((entry.path, _Piece(entry.start + (first - entry.origin) * row_bytes, target)))
            covered += last - first
    if covered != end - shard.origin:
        raise ValueError(f"rows of {shard.name} are missing")
    return pieces


class _BlockReader:
    """Reads blocks of files by several threads: into tensors on the CPU, else through a buffer of each thread."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._threads = _make_threads(READER_THREADS, device)
        self._buffers = threading.local()

    def __enter__(self) -> _BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, path: Path, pieces: Iterable[_Piece], digests: BlockDigests | None) -> None:
        """Fill the pieces from a file."""
        size = path.stat().st_size
        if digests is not None and size != digests.size:
            raise DamagedFile(f"damaged: {size} bytes instead of {digests.size}", file=path)
        block_size = BUCKET_BYTES if digests is None else digests.block_size
        by_block: dict[int, list[_Piece]] = {}
        for piece in pieces:
            for number in range(piece.start // block_size, -(-(piece.start + len(piece.target)) // block_size)):
                by_block.setdefault(number, []).append(piece)
        blocks = block_spans(size, block_size)
        reads = [
            self._threads.submit(self._read_block, path, blocks[number], parts, digests, number)
            for number, parts in sorted(by_block.items())
        ]
        for read in reads:
            read.result()

    def _read_block(
        self, path: Path, span: tuple[int, int], pieces: list[_Piece], digests: BlockDigests | None, number: int
    ) -> None:
        parts = self._fill(path, *span, pieces)
        if digests is None:
            deque(parts, maxlen=0)
        elif not digests.matches(number, parts):
            fact = f"damaged: its bytes {span[0]} to {span[1]} differ from those that were written"
            raise DamagedFile(fact, file=path)

    def _fill(self, path: Path, start: int, end: int, pieces: list[_Piece]) -> Iterator[memoryview]:
        """Yield a block in parts, and fill the pieces with them; a part inside of one on the CPU is read in place."""
        with open(path, "rb", buffering=0) as file:
            for first in range(start, end, PART_BYTES):
                last = min(first + PART_BYTES, end)
                targets = []
                for piece in pieces:
                    low, high = max(piece.start, first), min(piece.start + len(piece.target), last)
                    if low < high:
                        targets.append((low - first, piece.target[low - piece.start : high - piece.start]))
                direct = len(targets) == 1 and len(targets[0][1]) == last - first and not targets[0][1].is_cuda
                part = targets[0][1] if direct else self._buffer()[: last - first]
                content = part.numpy().data
                read_into(file, first, content)
                for offset, target in () if direct else targets:
                    target.copy_(part[offset : offset + len(target)], non_blocking=True)
                yield content  # hashed while it is copied to a GPU
                for device in {target.device for _, target in targets if target.is_cuda}:
                    torch.cuda.current_stream(device).synchronize()

    def _buffer(self) -> Tensor:
        """Return the buffer of this thread."""
        if not hasattr(self._buffers, "own"):
            self._buffers.own = torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
        own: Tensor = self._buffers.own
        return own
