"""What tells two files apart without carrying them: the hub names a large file by SHA-256, a small one as Git does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

Content = Path | bytes
"""A file, or what would be in it."""


class Checksum(NamedTuple):
    """Of a file on the hub."""

    size: int
    git: str
    """The name that Git gives the content; of a large file, that of its pointer."""
    sha256: str | None
    """Of large files alone."""

    def fits(self, content: Content) -> bool:
        """Whether this is the same content. A file of another size is not read."""
        if size_of(content) != self.size:
            return False
        return sha256_of(content) == self.sha256 if self.sha256 is not None else git_of(content) == self.git


def size_of(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def sha256_of(content: Content) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with open(content, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_of(content: Content) -> str:
    """The name of a Git blob."""
    header = b"blob %d\0" % size_of(content)
    if isinstance(content, bytes):
        return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
    with open(content, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest()
