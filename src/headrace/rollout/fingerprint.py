"""Fingerprint of a run's data: the number of examples and a digest of them in order.

A run keeps positions into data, not the data; the fingerprint shows on resume that positions refer to other examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

BY_POSITION = (
    "Examples are drawn by position as before, so one pass may repeat some examples and skip others. To avoid this, "
    "restore the old data, or start a run with the new data in another output_dir"
)
"""The consequence of changed data for a resumed run."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class Fingerprint(msgspec.Struct, frozen=True):
    examples: int
    digest: str

    def change_to(self, now: Fingerprint) -> str | None:
        """Return a description of how `now` differs; None if it is equal."""
        if now == self:
            return None
        if now.examples == self.examples:
            return f"still {now.examples:,} examples, but different ones or in another order"
        return f"{self.examples:,} examples before, {now.examples:,} now"


def fingerprint(examples: Iterable[Any]) -> Fingerprint:
    count, digest = 0, hashlib.blake2b(digest_size=16)
    for example in examples:
        try:
            content = _encode(example)
        except (TypeError, ValueError):  # not JSON, or an unpaired surrogate
            content = repr(example).encode(errors="backslashreplace")
        digest.update(content + b"\n")
        count += 1
    return Fingerprint(count, digest.hexdigest())
