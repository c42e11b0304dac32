"""Memory of a GPU that can be given back for a while and comes back at the same address.

An engine that shares its GPU with a trainer gives its cache up while the trainer computes. Its CUDA graphs have the
cache's address in them, so a plain free will not do: here the address is reserved for good, and the memory behind it is
taken and given back through the driver. What was in it is lost; it comes back as zeros. torch's allocator knows nothing
of it, and a tensor that is read while the memory is away takes the whole process's GPU context down. Giving back a part
was left out: a cache has its layers one after the other, so that its last bytes are not its last blocks.
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
from headrace.inference.cuda_driver import Access, AllocationProperties, Bytes, DriverError, Location, expect


class OutOfDeviceMemory(DriverError):
    """Somebody else has too much of the GPU's memory."""


class DeviceMemory:
    """`size` bytes of a GPU, there from the start. Freed once neither it nor a tensor of it is left."""

    def __init__(self, size: int, device: torch.device) -> None:
        if size <= 0:
            raise ValueError(f"memory of {size} bytes")
        self.size = size
        self._range = _Range.reserve(size, device)
        self._bytes = Bytes(self._range.address, self._range.size)
        weakref.finalize(self._bytes, self._range.free).atexit = False
        self._range.fill()

    @property
    def is_there(self) -> bool:
        """Whether its tensors may be used."""
        return self._range.handle is not None

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A tensor over the bytes from `offset` on; several may lie over the same ones."""
        needed = prod(shape) * dtype.itemsize
        if offset < 0 or offset + needed > self.size:
            raise ValueError(f"{needed} bytes from {offset} on are not within {self.size}")
        if not self.is_there:
            raise RuntimeError("the memory is given back: restore it before a tensor is made of it")
        whole = cuda_driver.view(self._bytes, self._range.device)
        return whole[offset : offset + needed].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Give the memory back, once the GPU is done with what was queued. Without effect where that has been done."""
        self._range.empty()

    def restore(self) -> None:
        """Take memory again, all zeros; `OutOfDeviceMemory` where there is not enough, and then nothing has changed."""
        self._range.fill()


@dataclass
class _Range:
    """Addresses of a GPU, and what is behind them."""

    address: int
    size: int
    device: torch.device
    handle: int | None = None

    @classmethod
    def reserve(cls, size: int, device: torch.device) -> _Range:
        device = cuda_driver.numbered(device)
        torch.cuda.synchronize(device)  # makes the context of the GPU this thread's
        granularity, address = ctypes.c_size_t(), ctypes.c_uint64()
        properties, driver = _properties(device.index), cuda_driver.library()
        found = driver.cuMemGetAllocationGranularity(ctypes.byref(granularity), properties, cuda_driver.MINIMUM)
        expect(found, "the size of a piece of memory")
        whole = -(-size // granularity.value) * granularity.value
        expect(driver.cuMemAddressReserve(ctypes.byref(address), whole, 0, 0, 0), f"{whole} bytes of addresses")
        return cls(address.value, whole, device)

    def fill(self) -> None:
        if self.handle is not None:
            return
        torch.cuda.synchronize(self.device)
        handle = ctypes.c_uint64()
        made = cuda_driver.library().cuMemCreate(ctypes.byref(handle), self.size, _properties(self.device.index), 0)
        if made == cuda_driver.OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            raise OutOfDeviceMemory(
                f"{_gib(self.size)} were asked for, and {_gib(free)} of the GPU's {_gib(total)} are free"
            )
        expect(made, f"{_gib(self.size)} of memory")
        try:
            self._map(handle.value)
        except DriverError:
            expect(cuda_driver.library().cuMemRelease(handle.value), "memory given back")
            raise
        self.handle = handle.value
        cuda_driver.view(Bytes(self.address, self.size), self.device).zero_()
        torch.cuda.synchronize(self.device)  # whatever stream comes next finds zeros

    def _map(self, handle: int) -> None:
        expect(cuda_driver.library().cuMemMap(self.address, self.size, 0, handle, 0), "memory at its address")
        access = Access(Location(cuda_driver.ON_DEVICE, self.device.index), cuda_driver.READ_AND_WRITE)
        allowed = cuda_driver.library().cuMemSetAccess(self.address, self.size, ctypes.byref(access), 1)
        if allowed != cuda_driver.SUCCESS:
            expect(cuda_driver.library().cuMemUnmap(self.address, self.size), "an address without memory")
        expect(allowed, "access to memory")

    def empty(self) -> None:
        if self.handle is None:
            return
        torch.cuda.synchronize(self.device)
        expect(cuda_driver.library().cuMemUnmap(self.address, self.size), "an address without memory")
        handle, self.handle = self.handle, None
        expect(cuda_driver.library().cuMemRelease(handle), "memory given back")

    def free(self) -> None:
        self.empty()
        expect(cuda_driver.library().cuMemAddressFree(self.address, self.size), "addresses given back")


def _properties(index: int) -> Any:
    location = Location(cuda_driver.ON_DEVICE, index)
    return ctypes.byref(AllocationProperties(type=cuda_driver.PINNED, location=location))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
