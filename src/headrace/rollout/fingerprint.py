"""What a run remembers of its data: how many examples there are, and a digest of them in their order.

Positions point into data that is not kept in the run. If that has changed when the run goes on, they point elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

BY_POSITION = (
    "Examples are drawn by position, as if nothing had changed: in a pass over them some may come twice, others not at "
    "all. If that is not meant, bring the old data back, or begin a run with the new data in another output_dir"
)
"""What follows from a change for a run that goes on."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class Fingerprint(msgspec.Struct, frozen=True):
    examples: int
    digest: str

    def change_to(self, now: Fingerprint) -> str | None:
        """In words, how the data of today differs; None if it does not."""
        if now == self:
            return None
        if now.examples == self.examples:
            return f"{now.examples:,} examples as before, but not the same, or in another order"
        return f"{self.examples:,} examples then, {now.examples:,} now"


def fingerprint(examples: Iterable[Any]) -> Fingerprint:
    count, digest = 0, hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(_bytes(example) + b"\n")
        count += 1
    return Fingerprint(count, digest.hexdigest())


def _bytes(example: Any) -> bytes:
    try:
        return _encode(example)
    except (TypeError, ValueError):  # no JSON, or half a character: it can be told apart all the same
        return repr(example).encode(errors="backslashreplace")
