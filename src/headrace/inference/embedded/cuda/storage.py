"""Keys and values of all layers in one piece of device memory, and how a model's attention finds its own.

Every module that has a layer's number gets that layer's keys and values as attributes: tensors of a module are what a
compiled program takes as its inputs, so that one program serves all layers. The memory can be given back for a while
and returns at the same addresses, which graphs have in them; of a GPU that cannot do that it is kept for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.inference.cuda_driver import has_virtual_memory
from headrace.inference.embedded.blocks import BLOCK
from headrace.inference.embedded.device_memory import DeviceMemory


class Storage:
    """[slot, head, dimension] of keys and of values for each layer."""

    def __init__(
        self, layers: int, blocks: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, 2, blocks * BLOCK, heads, dim)
        self.heads, self.dim = heads, dim
        self._memory: DeviceMemory | None = None
        if device.type == "cuda" and has_virtual_memory(device):
            size = layers * 2 * blocks * BLOCK * heads * dim * dtype.itemsize
            self._memory = DeviceMemory(size, device)
            self.states = self._memory.tensor(dtype, shape)
        else:
            self.states = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """What `release` would give back."""
        return 0 if self._memory is None else self._memory.size

    def attach(self, model: Any) -> None:
        """Let every module with a layer's number have that layer's keys and values."""
        for module in model.modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int) and number < len(self.states):
                # Not as views: the compiler would look at all of the storage, and take its sizes for those of others.
                module.paged_keys, module.paged_values = (states.data for states in self.states[number])
                torch._dynamo.mark_static(module.paged_keys)
                torch._dynamo.mark_static(module.paged_values)

    @staticmethod
    def detach(model: Any) -> None:
        """Take that back from all modules."""
        for module in model.modules():
            for name in ("paged_keys", "paged_values"):
                vars(module).pop(name, None)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, layer by layer: all at once would need as much memory again."""
        device = self.states.device
        read, written = torch.tensor([list(sources), list(targets)], device=device)
        for states in self.states.flatten(0, 1):
            blocks = states.view(-1, BLOCK * self.heads * self.dim)
            blocks.index_copy_(0, written, blocks.index_select(0, read))

    def clear(self, blocks: Sequence[int]) -> None:
        if blocks:
            cleared = torch.tensor(list(blocks), device=self.states.device)
            for states in self.states.flatten(0, 1):
                states.view(-1, BLOCK * self.heads * self.dim).index_fill_(0, cleared, 0)

    def release(self) -> int:
        """Give the memory back; returns how many bytes that was."""
        if self._memory is None or not self._memory.is_there:
            return 0
        self._memory.release()
        return self._memory.size

    def restore(self) -> None:
        if self._memory is not None:
            self._memory.restore()
