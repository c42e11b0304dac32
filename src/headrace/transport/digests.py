"""Digests of a run's files: in the footer of a Parquet file, and in a hidden file of a directory that has no marker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.rollout.digest import NO_DIGEST, digest_of, digest_of_parts, is_whole, seal
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.transport.files import check_regular

CHUNK_BYTES = 1 << 20
MISMATCH = "damaged: its content does not match its digest"
DIGESTS = ".digests.json"
PARQUET_KEY = "headrace.digest"
"""Key in the metadata of a Parquet file; the writer sets it to `NO_DIGEST`."""
_BEFORE_DIGEST = PARQUET_KEY.encode() + b"\x18\x20"
"""The key as Thrift writes it in the footer, with type and length of the value."""


class DirectoryDigests(msgspec.Struct):
    """The content of `DIGESTS`: digests of all other files of the directory by name."""

    files: dict[str, str]
    schema: int = SCHEMA


def file_digest(path: Path) -> str:
    """Return the xxh3-128 digest of a regular file."""
    check_regular(path)
    with open(path, "rb") as file:
        return digest_of_parts(iter(lambda: file.read(CHUNK_BYTES), b""))


def write_digests(directory: Path) -> None:
    """Write `DIGESTS` of a directory, replacing one that was copied from another directory with its files."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name != DIGESTS)
    digests = {name: file_digest(directory / name) for name in names}
    (directory / DIGESTS).write_bytes(seal(DirectoryDigests(digests)))


def check_directory(directory: Path) -> Iterator[Path | DamagedFile]:
    """Yield each file with a digest, or its damage; nothing for a directory without digests."""
    path = directory / DIGESTS
    if not path.is_file():
        return
    try:
        digests = decode_versioned(path.read_bytes(), DirectoryDigests, str(path)).files
    except DamagedFile as damage:
        yield damage
        return
    yield path
    for name, digest in digests.items():
        if name != DIGESTS:  # earlier versions recorded the one that was copied from another directory
            yield check_file(directory / name, digest)


def check_file(path: Path, digest: str) -> Path | DamagedFile:
    """Return the path of a file if it has this digest, else its damage."""
    try:
        whole = file_digest(path) == digest
    except DamagedFile as damage:
        return damage
    except FileNotFoundError:
        return DamagedFile("missing", file=path)
    return path if whole else DamagedFile(MISMATCH, file=path)


def check_sealed(path: Path) -> Path | DamagedFile | None:
    """Return the path of an intact JSON document, else its damage; None if it has no digest."""
    content = path.read_bytes()
    whole = is_whole(content)
    if whole is None:
        try:
            msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return DamagedFile(f"damaged: {error}", file=path)
        return None
    return path if whole else DamagedFile(MISMATCH, file=path)


def seal_parquet(path: Path) -> None:
    """Replace `NO_DIGEST` in the footer of a complete Parquet file by the digest of the file."""
    content = path.read_bytes()
    start = content.rindex(_BEFORE_DIGEST + NO_DIGEST) + len(_BEFORE_DIGEST)
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), digest_of(content).encode(), start)


def check_parquet(path: Path) -> Path | DamagedFile | None:
    """Return the path of an intact Parquet file, else its damage; None if it has no digest."""
    check_regular(path)
    content = path.read_bytes()
    before, key, after = content.rpartition(_BEFORE_DIGEST)
    if not key:
        return None
    if digest_of(before, key, NO_DIGEST, after[len(NO_DIGEST) :]).encode() == after[: len(NO_DIGEST)]:
        return path
    return DamagedFile(MISMATCH, file=path)
