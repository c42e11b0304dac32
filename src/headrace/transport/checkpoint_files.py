"""The marker of a checkpoint, with digests of its files, without torch.

A large file has a digest for each block, so that threads verify blocks in parallel, and a reader only those it reads.
Blocks are read and hashed in parts, so that one thread hashes while others wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.rollout.digest import Content, digest_of_parts
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.transport.digests import check_file, file_digest
from headrace.transport.files import MARKER, STEP, check_regular

TENSORS = "tensors"
"""The directory of a checkpoint's tensor files."""
STATE = "state.json"
"""The trainer's counters in a checkpoint."""
READER_THREADS = 8
PART_BYTES = 1 << 22
"""Bytes that are read and then hashed while they are in the CPU's cache."""
XXH3 = "xxh3-128"


class BlockDigests(msgspec.Struct):
    """The size of a file, and the digest of each of its blocks, of which the last may be smaller."""

    size: int
    block_size: int
    digests: list[str]
    algorithm: str = "blake2b"
    """Older versions always used this one, and did not name it."""
    header: str = ""
    """Digest of the file's header and its length, which a reader reads first. Older versions did not write it."""

    def matches(self, number: int, parts: Iterable[Content]) -> bool:
        """Return whether a block, in consecutive parts, is as it was written."""
        if self.algorithm == XXH3:
            return digest_of_parts(parts) == self.digests[number]
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        return digest.hexdigest() == self.digests[number]


class CheckpointMarker(msgspec.Struct):
    """The completion marker of a checkpoint: digests of its tensor files by name, and of other files by their path."""

    step: int
    schema: int = SCHEMA
    tensors: dict[str, BlockDigests] = {}
    files: dict[str, str] = {}


def read_marker(checkpoint: Path) -> CheckpointMarker:
    """Return the marker of a complete checkpoint."""
    path = checkpoint / MARKER
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {MARKER}: it is not a checkpoint, or incomplete")
    return decode_versioned(path.read_bytes(), CheckpointMarker, str(path))


def digests_of(directory: Path) -> dict[str, str]:
    """Return the digests of all files in a directory by their relative path, except tensor files."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.parent.name != TENSORS)
    return {str(path.relative_to(directory)): file_digest(path) for path in paths}


def check_files(checkpoint: Path, marker: CheckpointMarker) -> None:
    """Raise `DamagedFile` if a file other than tensors differs from its digest."""
    for name, digest in marker.files.items():
        if isinstance(check := check_file(checkpoint / name, digest), DamagedFile):
            raise check


def check_checkpoint(checkpoint: Path) -> Iterator[Path | DamagedFile]:
    """Yield each file of a checkpoint that has a digest, or its damage; reads all of them."""
    try:
        marker = read_marker(checkpoint)
    except DamagedFile as error:
        yield error
        return
    if marker.files:  # older versions wrote neither these nor a digest of the marker
        yield checkpoint / MARKER
    elif not (checkpoint / STATE).is_file():
        yield DamagedFile("missing", file=checkpoint / STATE)
    if not marker.tensors and not any((checkpoint / TENSORS).glob("*")):
        yield DamagedFile("missing", file=checkpoint / TENSORS)
    yield from (check_file(checkpoint / name, digest) for name, digest in marker.files.items())
    yield from (_check_blocks(checkpoint / TENSORS / name, recorded) for name, recorded in marker.tensors.items())


def _check_blocks(path: Path, recorded: BlockDigests) -> Path | DamagedFile:
    size = path.stat().st_size if path.is_file() else None
    if size != recorded.size:
        fact = "missing" if size is None else f"damaged: {size} bytes instead of {recorded.size}"
        return DamagedFile(fact, file=path)
    blocks = block_spans(recorded.size, recorded.block_size)

    def is_whole(number: int, span: tuple[int, int]) -> bool:
        return recorded.matches(number, read_parts(path, *span))

    with ThreadPoolExecutor(READER_THREADS) as readers:
        whole = readers.map(is_whole, range(len(blocks)), blocks)
        differ = [start for (start, _), same in zip(blocks, whole, strict=True) if not same]
    if not differ:
        return path
    fact = f"damaged: {len(differ)} of {len(blocks)} blocks differ, the first at byte {differ[0]}"
    return DamagedFile(fact, file=path)


def find_damage(checkpoint: Path) -> Iterator[DamagedFile]:
    """Yield an error for each file of a checkpoint that differs from its digests; reads all of them."""
    return (check for check in check_checkpoint(checkpoint) if isinstance(check, DamagedFile))


def find_damage_of_all(directory: Path) -> Iterator[DamagedFile]:
    """Yield what `find_damage` finds in the complete checkpoints of a directory, permanent ones included."""
    markers = sorted(directory.rglob(f"{STEP}/{MARKER}"))
    distinct = {marker.stat().st_ino: marker for marker in markers if marker.exists()}  # one of several hard links
    for marker in distinct.values():
        with contextlib.suppress(FileNotFoundError):
            problems = [*find_damage(marker.parent)]
            if marker.exists():  # otherwise the checkpoint was deleted meanwhile
                yield from problems


def block_spans(size: int, block_size: int) -> list[tuple[int, int]]:
    """Return start and end of each block of a file of `size` bytes."""
    return [(start, min(start + block_size, size)) for start in range(0, size, block_size)]


def read_parts(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `start` to `end` of a file in parts; each is valid until the next one is read."""
    check_regular(path)
    buffer = memoryview(bytearray(min(PART_BYTES, end - start)))
    with open(path, "rb", buffering=0) as file:
        for first in range(start, end, PART_BYTES):
            part = buffer[: end - first]
            read_into(file, first, part)
            yield part


def read_into(file: BinaryIO, start: int, target: memoryview) -> None:
    """Fill `target` with the bytes of a file from `start` on; raise `EOFError` if the file is too short."""
    while len(target):
        count = os.preadv(file.fileno(), [target], start)
        if not count:
            raise EOFError(f"{file.name} has only {start} bytes")
        target, start = target[count:], start + count
