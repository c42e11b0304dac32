"""Digests of files, documents and a run's data: they detect damage, not manipulation.

Files have xxh3-128, which is about as fast as memory. JSON documents are sealed with a digest of themselves by the
standard library, because vLLM's workers, whose environment has no xxhash, read some of them.
A run keeps positions in its data, not the data: on resume, a fingerprint shows whether the data has changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

Content = bytes | bytearray | memoryview

NO_DIGEST = 32 * b"0"
"""Placeholder for a file's digest in the file itself, while the digest is computed."""

_SEAL = re.compile(rb',"(.{6})":"(.{32})"\}\Z', re.DOTALL)
"""Key and digest at the end of a sealed document. A damaged key is found by its digest, which still matches."""


def digest_of(*parts: Content) -> str:
    """Return the xxh3-128 digest of the concatenated parts, in hexadecimal."""
    return digest_of_parts(parts)


def digest_of_parts(parts: Iterable[Content]) -> str:
    """Return the xxh3-128 digest of parts of a large file, which are read one at a time, in hexadecimal."""
    import xxhash

    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def seal(document: msgspec.Struct) -> bytes:
    """Encode a document as JSON whose last key is a digest of the others."""
    content = msgspec.json.encode(document)
    return b'%s,"digest":"%s"}' % (content[:-1], _seal_of(content))


def is_whole(content: bytes) -> bool | None:
    """Return whether a sealed document is as it was written; None: it has no digest."""
    match = _SEAL.search(content)
    if match is None:
        return None
    is_equal = _seal_of(content[: match.start()] + b"}") == match[2]
    return is_equal if match[1] == b"digest" else False if is_equal else None


def _seal_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


CHANGED_DATA = (
    "Examples are drawn by position as before, so one pass may repeat some examples and skip others. To avoid this, "
    "restore the old data, or start a run with the new data in another output_dir"
)
"""Message on the consequence of changed data for a resumed run."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class Fingerprint(msgspec.Struct, frozen=True):
    """The number of a run's examples, and a digest of their contents in order."""

    examples: int
    digest: str

    def describe_change(self, now: Fingerprint) -> str | None:
        """Describe how the data has changed; None if it has not."""
        if now == self:
            return None
        if now.examples == self.examples:
            return f"still {now.examples:,} examples, but different ones or in another order"
        return f"{self.examples:,} examples before, {now.examples:,} now"


def fingerprint(examples: Iterable[Any]) -> Fingerprint:
    """Count the examples and compute the digest of their contents."""
    count, digest = 0, hashlib.blake2b(digest_size=16)
    for example in examples:
        try:
            content = _encode(example)
        except (TypeError, ValueError):  # not JSON, or an unpaired surrogate
            content = repr(example).encode(errors="backslashreplace")
        digest.update(content + b"\n")
        count += 1
    return Fingerprint(count, digest.hexdigest())
