"""The marker of a checkpoint, with digests of its tensor files, without torch.

A large file has a digest for each block, so that threads verify blocks in parallel, and a reader only those it reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.transport.files import MARKER

TENSORS = "tensors"
"""The directory of a checkpoint's tensor files."""
READER_THREADS = 8


class BlockDigests(msgspec.Struct):
    """The size of a file, and the digest of each of its blocks, of which the last may be smaller."""

    size: int
    block_size: int
    digests: list[str]


class CheckpointMarker(msgspec.Struct):
    """The completion marker of a checkpoint. `tensors`: digests by file name; older versions wrote none."""

    step: int
    schema: int = SCHEMA
    tensors: dict[str, BlockDigests] = {}


def read_marker(checkpoint: Path) -> CheckpointMarker:
    """Return the marker of a complete checkpoint."""
    path = checkpoint / MARKER
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {MARKER}: it is not a checkpoint, or incomplete")
    return decode_versioned(path.read_bytes(), CheckpointMarker, str(path))


def find_damage(checkpoint: Path) -> Iterator[str]:
    """Yield a sentence for each tensor file of a checkpoint that differs from its digests; reads all of them."""
    for name, recorded in read_marker(checkpoint).tensors.items():
        path = checkpoint / TENSORS / name
        size = path.stat().st_size if path.is_file() else None
        if size != recorded.size:
            yield f"{path} is damaged: " + ("missing" if size is None else f"{size} bytes instead of {recorded.size}")
            continue
        blocks = block_spans(recorded.size, recorded.block_size)
        with ThreadPoolExecutor(READER_THREADS) as readers:
            found = readers.map(lambda span, path=path: _digest_of(path, *span), blocks)
            differ = [start for (start, _), own, one in zip(blocks, found, recorded.digests, strict=True) if own != one]
        if differ:
            yield f"{path} is damaged: {len(differ)} of {len(blocks)} blocks differ, the first at byte {differ[0]}"


def find_damage_of_all(directory: Path) -> Iterator[str]:
    """Yield what `find_damage` finds in the complete checkpoints of a directory, permanent ones included."""
    markers = sorted(directory.rglob(f"step-*/{MARKER}"))
    distinct = {marker.stat().st_ino: marker for marker in markers if marker.exists()}  # of hard links, one
    for marker in distinct.values():
        with contextlib.suppress(FileNotFoundError):
            problems = [*find_damage(marker.parent)]
            if marker.exists():  # otherwise the checkpoint was deleted meanwhile
                yield from problems


def block_spans(size: int, block_size: int) -> list[tuple[int, int]]:
    """Return start and end of each block of a file of `size` bytes."""
    return [(start, min(start + block_size, size)) for start in range(0, size, block_size)]


def block_digest(content: bytearray | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_into(path: Path, start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file from `start` on; raise EOFError if the file is too short."""
    with open(path, "rb", buffering=0) as file:
        while len(target):
            count = os.preadv(file.fileno(), [target], start)
            if not count:
                raise EOFError(f"{path} has only {start} bytes")
            target, start = target[count:], start + count


def _digest_of(path: Path, start: int, end: int) -> str:
    content = bytearray(end - start)
    read_into(path, start, memoryview(content))
    return block_digest(content)
