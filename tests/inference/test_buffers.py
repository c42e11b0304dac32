"""Tensors as rows of bytes, and the digest of such a row."""

import itertools
import random
import struct

import pytest
import torch

from headrace.inference.weights import buffers
from headrace.inference.weights.buffers import as_bytes, compiled_digest, digest, view_tensors
from headrace.transport.weights_link import TensorSpan

MASK = (1 << 64) - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def by_hand(content: bytes) -> int:
    """The definition, with Python's numbers."""
    total = 0
    for place, (word,) in enumerate(struct.iter_unpack("<Q", content)):
        mixed = (word + place * STEP) & MASK
        mixed = (mixed ^ mixed >> 32) * FIRST & MASK
        total += (mixed ^ mixed >> 32) * SECOND
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def as_row(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def test_the_digest_matches_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(0).randbytes(8 * 37)
    assert int(digest(as_row(content))) == by_hand(content)
    monkeypatch.setattr(buffers, "DIGEST_WORDS", 8)
    assert int(digest(as_row(content))) == by_hand(content)


def test_without_a_kernel_for_the_device_digests_are_computed_by_torch() -> None:
    assert compiled_digest(torch.device("cpu")) is None


def test_every_bit_and_the_order_of_words_matter() -> None:
    rng = random.Random(1)
    content = rng.randbytes(64)
    seen = {int(digest(as_row(content)))}
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(int(digest(as_row(bytes(changed)))))
    seen.add(int(digest(as_row(content[8:16] + content[:8] + content[16:]))))
    seen.add(int(digest(as_row(content + bytes(8)))))
    assert len(seen) == 1 + 512 + 2


def test_signs_that_change_in_two_places_do_not_cancel_out() -> None:
    # The highest bit of a word is what sums of products forget first: 2**63 times two odd numbers is nothing.
    row = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = set()
    for first, second in itertools.combinations(range(32), 2):
        flipped = row.clone()
        flipped[[first, second]] *= -1
        seen.add(int(digest(as_bytes(flipped))))
    assert len({int(digest(as_bytes(row))), *seen}) == 1 + 32 * 31 // 2


def test_tensors_come_back_as_views_of_the_row() -> None:
    matrix = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    scalar, nothing = torch.tensor(7, dtype=torch.int64), torch.empty(0, 4)
    row = torch.cat([as_bytes(matrix), torch.zeros(4, dtype=torch.uint8), as_bytes(scalar), as_bytes(nothing)])
    found = view_tensors(
        row,
        [
            TensorSpan("matrix", "bfloat16", [2, 3], 0),
            TensorSpan("scalar", "int64", [], 16),
            TensorSpan("nothing", "float32", [0, 4], 24),
        ],
    )
    assert torch.equal(found["matrix"], matrix) and torch.equal(found["scalar"], scalar)
    assert found["nothing"].shape == (0, 4)
    row[0] = 255
    assert not torch.equal(found["matrix"], matrix)


def test_a_transposed_tensor_is_written_in_the_order_of_its_indices() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.equal(as_bytes(tensor.t()).view(torch.float32), torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]))
