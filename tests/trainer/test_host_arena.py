"""Tensors that share slabs of host memory."""

import pytest
import torch

from headrace.trainer import optim
from headrace.trainer.optim import ALIGNMENT_BYTES, HostArena


def test_tensors_of_all_sizes_share_slabs_without_overlap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optim, "SLAB_BYTES", 1 << 20)
    arena, rows = HostArena(pinned=False), [12288, 12288, 12288, 1024, 1, 0, 4096, 4096] * 4  # those of a decoder layer
    tensors = {number: torch.full((size, 4), float(number)) for number, size in enumerate(rows)}
    tensors[-1] = torch.tensor(7.0)
    copies = {key: arena.copy(key, tensor) for key, tensor in tensors.items()}
    assert all(torch.equal(copies[key], tensor) for key, tensor in tensors.items())
    needed = sum(tensor.nbytes + ALIGNMENT_BYTES for tensor in tensors.values())
    assert arena.slab_bytes < needed + 2 * (1 << 20)  # the rest of the last slab, and gaps


def test_the_next_copy_of_a_key_takes_the_place_of_the_last():
    arena = HostArena(pinned=False)
    first = arena.copy("a", torch.ones(3))
    second = arena.copy("a", torch.zeros(3))
    assert first.data_ptr() == second.data_ptr()
    assert not second.any()
