"""Memory of a GPU that two processes share: one takes it and exports it, the other opens it at an address of its own.

Through the driver itself: torch's own way of sharing pickles what it sends, and exports whole segments of its
allocator, which cannot be done with those that can be expanded. So what is exported here is taken apart from torch's
memory, and a handle is 64 plain bytes, of use to any other process on the same GPU.

Left out on purpose: giving exported memory back. Nobody can know that no other process has it open, and what such a
one read would no longer be there; it goes with the process that took it, and the last that has it open.
"""

from __future__ import annotations

import ctypes

import torch

from headrace.inference import cuda_driver
from headrace.inference.cuda_driver import Bytes, IpcHandle, expect

_PAGE = 1 << 21
"""What is smaller may lie on one page with other memory, and that would be shared with it."""


class ExportedMemory:
    """At least `size` bytes of a GPU, which others can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        device = cuda_driver.numbered(device)
        self.size = -(-size // _PAGE) * _PAGE
        driver, address, handle = cuda_driver.library(), ctypes.c_uint64(), IpcHandle()
        with cuda_driver.context(device):
            taken = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            if taken == cuda_driver.OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # torch may hold on to some that it does not use
                taken = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            expect(taken, f"{self.size / 1e9:.2g} GB of memory")
            exported = driver.cuIpcGetMemHandle(ctypes.byref(handle), address)
            if exported != cuda_driver.SUCCESS:
                driver.cuMemFree_v2(address)
            expect(exported, "to export memory")
        self.handle = bytes(handle)
        self.bytes = cuda_driver.view(Bytes(address.value, self.size), device)


class OpenedMemory:
    """Memory that another process has exported. Even if that one dies it is there until it is closed."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        self._device = cuda_driver.numbered(device)
        address = ctypes.c_uint64()
        with cuda_driver.context(self._device):
            opened = cuda_driver.library().cuIpcOpenMemHandle_v2(
                ctypes.byref(address), IpcHandle.from_buffer_copy(handle), cuda_driver.LAZY_PEER_ACCESS
            )
            expect(opened, "to open the memory of another process")
        self._address = address.value
        self.bytes = cuda_driver.view(Bytes(self._address, size), self._device)

    def close(self) -> None:
        """Once everything that reads it is through: a tensor of it that is used afterwards ends all work on the GPU."""
        address, self._address = self._address, 0
        if address:
            with cuda_driver.context(self._device):
                expect(cuda_driver.library().cuIpcCloseMemHandle(address), "to close the memory of another process")
