"""GPU memory that two processes share (CUDA IPC): one allocates and exports it, the other opens it.

It uses the driver directly: torch's sharing pickles its messages, and exports whole segments of its allocator, which is
not possible with expandable segments. So exported memory is allocated outside of torch, and a handle is 64 plain bytes
that any other process on the same GPU can open.

Left out on purpose: freeing exported memory. The exporter cannot know whether another process still reads it; it is
freed when the exporter has ended and the last process has closed it.
"""

from __future__ import annotations

import ctypes

import torch

from headrace.inference import cuda_driver
from headrace.inference.cuda_driver import Bytes, IpcHandle, expect

_PAGE = 1 << 21
"""Smaller allocations may share a page with other memory, which would be exported, too."""


class ExportedMemory:
    """At least `size` bytes of a GPU that other processes can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        device = cuda_driver.with_index(device)
        self.size = -(-size // _PAGE) * _PAGE
        driver, address, handle = cuda_driver.library(), ctypes.c_uint64(), IpcHandle()
        with cuda_driver.context(device):
            result = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            if result == cuda_driver.OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # frees what torch has cached
                result = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            expect(result, f"{self.size / 1e9:.2g} GB of memory")
            exported = driver.cuIpcGetMemHandle(ctypes.byref(handle), address)
            if exported != cuda_driver.SUCCESS:
                driver.cuMemFree_v2(address)
            expect(exported, "to export memory")
        self.handle = bytes(handle)
        self.bytes = cuda_driver.view(Bytes(address.value, self.size), device)


class OpenedMemory:
    """Memory that another process has exported; valid until it is closed, even if the exporter ends."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        self._device = cuda_driver.with_index(device)
        address = ctypes.c_uint64()
        with cuda_driver.context(self._device):
            opened = cuda_driver.library().cuIpcOpenMemHandle_v2(
                ctypes.byref(address), IpcHandle.from_buffer_copy(handle), cuda_driver.LAZY_PEER_ACCESS
            )
            expect(opened, "to open the memory of another process")
        self._address = address.value
        self.bytes = cuda_driver.view(Bytes(self._address, size), self._device)

    def close(self) -> None:
        """Close the memory after all reads: using a tensor of it afterwards destroys the GPU context."""
        address, self._address = self._address, 0
        if address:
            with cuda_driver.context(self._device):
                expect(cuda_driver.library().cuIpcCloseMemHandle(address), "to close the memory of another process")
