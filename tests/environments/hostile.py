"""Texts that a model may come up with, and that no reward may choke on."""

from __future__ import annotations

import pytest

HOSTILE = {
    "empty": "",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x85\u2028\ufeff",
    "lone surrogates": "\ud800 and \udfff",
    "nested brackets": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "fences without end": "```json\n" * 10_000,
    "almost a match": "a" * 40 + "!",
    "huge": "0123456789" * 1_000_000,
    "blank": "\n" * 1_000_000,
}

hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
