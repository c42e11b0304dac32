"""The KV cache of all layers in one allocation of device memory, which can be freed for a while.

Each attention module gets the keys and values of its layer as attributes: a compiled program takes tensors of a module
as inputs, so that one program serves all layers.

An engine that shares its GPU with a trainer frees its cache while the trainer computes. CUDA graphs contain the cache's
address, so a plain free will not do: `DeviceMemory` reserves the address, and the driver maps memory to it and unmaps
it. Content is lost, and mapped memory is zeroed. torch's allocator is not involved; reading a tensor while its memory
is unmapped destroys the process's GPU context. On a GPU without virtual memory the cache is never freed. Left out on
purpose: freeing a part, since layers are consecutive and the last bytes are not the last blocks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from headrace.inference import cuda_driver
from headrace.inference.cuda_driver import (
    Access,
    AllocationProperties,
    Bytes,
    DriverError,
    Location,
    expect,
    has_virtual_memory,
)
from headrace.inference.embedded.block_manager import BLOCK_SIZE


class KVStorage:
    """Keys and values of all layers, [slot, head, dimension] each."""

    def __init__(
        self, layers: int, blocks: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, 2, blocks * BLOCK_SIZE, heads, dim)
        self.heads, self.dim = heads, dim
        self._memory: DeviceMemory | None = None
        if device.type == "cuda" and has_virtual_memory(device):
            size = layers * 2 * blocks * BLOCK_SIZE * heads * dim * dtype.itemsize
            self._memory = DeviceMemory(size, device)
            self.states = self._memory.tensor(dtype, shape)
        else:
            self.states = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """The memory that `release` would free."""
        return 0 if self._memory is None else self._memory.size

    def attach(self, model: Any) -> None:
        """Set `paged_keys` and `paged_values` of each module with a layer index."""
        for module in model.modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int) and number < len(self.states):
                # Not views: the compiler would guard on the whole storage, and mistake its sizes for others.
                module.paged_keys, module.paged_values = (states.data for states in self.states[number])
                torch._dynamo.mark_static(module.paged_keys)
                torch._dynamo.mark_static(module.paged_values)

    @staticmethod
    def detach(model: Any) -> None:
        """Undo `attach`."""
        for module in model.modules():
            for name in ("paged_keys", "paged_values"):
                vars(module).pop(name, None)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks layer by layer, to bound the temporary memory."""
        device = self.states.device
        read, written = torch.tensor([list(sources), list(targets)], device=device)
        for states in self.states.flatten(0, 1):
            blocks = states.view(-1, BLOCK_SIZE * self.heads * self.dim)
            blocks.index_copy_(0, written, blocks.index_select(0, read))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            cleared = torch.tensor(list(blocks), device=self.states.device)
            for states in self.states.flatten(0, 1):
                states.view(-1, BLOCK_SIZE * self.heads * self.dim).index_fill_(0, cleared, 0)

    def release(self) -> int:
        """Free the memory, and return its size; 0 if it cannot be freed or is free already."""
        if self._memory is None or not self._memory.is_mapped:
            return 0
        self._memory.release()
        return self._memory.size

    def restore(self) -> None:
        if self._memory is not None:
            self._memory.restore()


class OutOfDeviceMemory(DriverError):
    """The GPU has not enough free memory."""


class DeviceMemory:
    """`size` bytes of a GPU, mapped from the start; freed with the last reference to it and its tensors."""

    def __init__(self, size: int, device: torch.device) -> None:
        if size <= 0:
            raise ValueError(f"memory of {size} bytes")
        self.size = size
        self._range = _Range.reserve(size, device)
        self._bytes = Bytes(self._range.address, self._range.size)
        weakref.finalize(self._bytes, self._range.free).atexit = False
        self._range.map()

    @property
    def is_mapped(self) -> bool:
        """Whether the tensors of this memory may be used."""
        return self._range.handle is not None

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Return a tensor over the bytes from `offset` on; tensors may overlap."""
        needed = prod(shape) * dtype.itemsize
        if offset < 0 or offset + needed > self.size:
            raise ValueError(f"{needed} bytes from {offset} on are not within the {self.size} bytes of this memory")
        if not self.is_mapped:
            raise RuntimeError("the memory is released: restore it before creating a tensor")
        whole = cuda_driver.view(self._bytes, self._range.device)
        return whole[offset : offset + needed].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Unmap and free the memory after queued work; without effect if it is released."""
        self._range.unmap()

    def restore(self) -> None:
        """Allocate and map zeroed memory; raises `OutOfDeviceMemory`, and nothing has changed then."""
        self._range.map()


@dataclass
class _Range:
    """A reserved address range of a GPU, and the handle of the memory mapped to it."""

    address: int
    size: int
    device: torch.device
    handle: int | None = None

    @classmethod
    def reserve(cls, size: int, device: torch.device) -> _Range:
        """Reserve addresses for at least `size` bytes, to which no memory is mapped yet."""
        device = cuda_driver.with_index(device)
        torch.cuda.synchronize(device)  # makes the GPU's context current in this thread
        granularity, address = ctypes.c_size_t(), ctypes.c_uint64()
        properties, driver = _properties(device.index), cuda_driver.library()
        result = driver.cuMemGetAllocationGranularity(ctypes.byref(granularity), properties, cuda_driver.MINIMUM)
        expect(result, "the allocation granularity")
        whole = -(-size // granularity.value) * granularity.value
        expect(driver.cuMemAddressReserve(ctypes.byref(address), whole, 0, 0, 0), f"an address range of {whole} bytes")
        return cls(address.value, whole, device)

    def map(self) -> None:
        """Allocate memory, map it to the range and zero it, unless that is done."""
        if self.handle is not None:
            return
        torch.cuda.synchronize(self.device)
        handle = ctypes.c_uint64()
        result = cuda_driver.library().cuMemCreate(ctypes.byref(handle), self.size, _properties(self.device.index), 0)
        if result == cuda_driver.OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            raise OutOfDeviceMemory(
                f"{_gib(self.size)} are needed, and {_gib(free)} of the GPU's {_gib(total)} are free"
            )
        expect(result, f"{_gib(self.size)} of memory")
        try:
            self._map(handle.value)
        except DriverError:
            expect(cuda_driver.library().cuMemRelease(handle.value), "to free memory")
            raise
        self.handle = handle.value
        cuda_driver.view(Bytes(self.address, self.size), self.device).zero_()
        torch.cuda.synchronize(self.device)  # zeros for all streams

    def _map(self, handle: int) -> None:
        """Map allocated memory to the range, and allow access to it."""
        expect(cuda_driver.library().cuMemMap(self.address, self.size, 0, handle, 0), "to map memory")
        access = Access(Location(cuda_driver.ON_DEVICE, self.device.index), cuda_driver.READ_AND_WRITE)
        allowed = cuda_driver.library().cuMemSetAccess(self.address, self.size, ctypes.byref(access), 1)
        if allowed != cuda_driver.SUCCESS:
            expect(cuda_driver.library().cuMemUnmap(self.address, self.size), "to unmap memory")
        expect(allowed, "access to mapped memory")

    def unmap(self) -> None:
        """Unmap and free the memory after queued work, if there is any."""
        if self.handle is None:
            return
        torch.cuda.synchronize(self.device)
        expect(cuda_driver.library().cuMemUnmap(self.address, self.size), "to unmap memory")
        handle, self.handle = self.handle, None
        expect(cuda_driver.library().cuMemRelease(handle), "to free memory")

    def free(self) -> None:
        self.unmap()
        expect(cuda_driver.library().cuMemAddressFree(self.address, self.size), "to free an address range")


def _properties(index: int) -> Any:
    location = Location(cuda_driver.ON_DEVICE, index)
    return ctypes.byref(AllocationProperties(type=cuda_driver.PINNED, location=location))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
