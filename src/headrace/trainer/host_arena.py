"""Host memory for tensors of a GPU that live as long as the process, such as an offloaded optimizer state.

torch rounds every request of pinned memory up to a power of two, which would take a third more for a model's matrices:
12288 x 4096 float32 take 256 MiB instead of 192. Here tensors share slabs of such sizes.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SLAB_BYTES = 1 << 30
"""The least size of a slab."""
ALIGNMENT_BYTES = 256


class HostArena:
    """Copies of tensors in host memory by key; a key's memory is used again for its next copy."""

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._copies: dict[Hashable, Tensor] = {}
        self._free: list[Tensor] = []
        """Rows of bytes that are not used."""
        self.slab_bytes = 0
        """Bytes of all slabs."""

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Copy a tensor asynchronously, in the order of the GPU's current stream."""
        if isinstance(tensor, DTensor):  # a view of a slab cannot be one
            return tensor.to("cpu", non_blocking=True)
        if key not in self._copies:
            self._copies[key] = self._allocate(tensor)
        return self._copies[key].copy_(tensor, non_blocking=True)

    def _allocate(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes + -tensor.nbytes % ALIGNMENT_BYTES
        place = next((number for number, row in enumerate(self._free) if len(row) >= size), None)
        if place is None:
            slab = max(SLAB_BYTES, 1 << max(size - 1, 0).bit_length())
            self._free.append(torch.empty(slab, dtype=torch.uint8, pin_memory=self._pinned))
            self.slab_bytes += slab
            place = -1
        row = self._free[place]
        self._free[place] = row[size:]
        return row[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
