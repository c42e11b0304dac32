"""The CUDA driver API, for what torch lacks: memory that another process opens, or that is unmapped for a while.

Argument types of its calls, their context and errors, tensors over addresses, and memory that two processes share
(CUDA IPC): one allocates and exports it, and any other process on the same GPU can open the handle of 64 bytes. Torch's
own sharing pickles its messages and exports whole segments of its allocator. The library is loaded on first use, since
most machines have none.

Left out on purpose: freeing exported memory. The exporter cannot know whether another process still reads it; it is
freed when the exporter has ended and the last process has closed it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.errors import Failure

SUCCESS, OUT_OF_MEMORY = 0, 2
LAZY_PEER_ACCESS = 1
"""The required flag for opening another process's memory."""
PINNED, ON_DEVICE, READ_AND_WRITE, MINIMUM = 1, 1, 3, 0
_VIRTUAL_MEMORY = 102
"""Device attribute: whether memory can be mapped to and unmapped from an address."""
_EXPORT_PAGE_BYTES = 1 << 21
"""Smaller allocations may share a page with other memory, which would be exported, too."""


class DriverError(Failure):
    """A driver call failed; the message is the driver's."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


@cache
def library() -> Any:
    """Return the driver's calls; each returns a result for `expect`."""
    driver = ctypes.CDLL("libcuda.so.1")
    number, size, flags = ctypes.c_int, ctypes.c_size_t, ctypes.c_ulonglong
    context, address, handle = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
    pointer, properties = ctypes.POINTER, ctypes.POINTER(AllocationProperties)
    driver.cuInit.argtypes = [ctypes.c_uint]
    driver.cuGetErrorString.argtypes = [number, pointer(ctypes.c_char_p)]
    driver.cuDeviceGet.argtypes = [pointer(number), number]
    driver.cuDeviceGetAttribute.argtypes = [pointer(number), number, number]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer(context), number]
    driver.cuCtxPushCurrent_v2.argtypes = [context]
    driver.cuCtxPopCurrent_v2.argtypes = [pointer(context)]
    driver.cuMemAlloc_v2.argtypes = [pointer(address), size]
    driver.cuMemFree_v2.argtypes = [address]
    driver.cuIpcGetMemHandle.argtypes = [pointer(IpcHandle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer(address), IpcHandle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    driver.cuMemGetAllocationGranularity.argtypes = [pointer(size), properties, number]
    driver.cuMemAddressReserve.argtypes = [pointer(address), size, size, address, flags]
    driver.cuMemAddressFree.argtypes = [address, size]
    driver.cuMemCreate.argtypes = [pointer(handle), size, properties, flags]
    driver.cuMemMap.argtypes = [address, size, size, handle, flags]
    driver.cuMemSetAccess.argtypes = [address, size, pointer(Access), size]
    driver.cuMemUnmap.argtypes = [address, size]
    driver.cuMemRelease.argtypes = [handle]
    if driver.cuInit(0) != SUCCESS:
        raise DriverError("the CUDA driver cannot be initialized")
    return driver


def is_available() -> bool:
    """Return whether the driver can be used."""
    try:
        library()
    except (OSError, AttributeError, DriverError):  # AttributeError: the driver is too old for a call
        return False
    return True


def has_virtual_memory(device: torch.device) -> bool:
    """Return whether memory of this GPU can be freed while its address stays reserved."""
    if not is_available():
        return False
    value = ctypes.c_int()
    result = library().cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, _driver_index(with_index(device)))
    return result == SUCCESS and value.value == 1


def expect(result: int, what: str) -> None:
    """Raise `DriverError` unless a call succeeded; `what` describes the request."""
    if result != SUCCESS:
        message = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(message))
        reason = message.value.decode() if message.value else f"error {result}"
        raise DriverError(f"the CUDA driver refused {what}: {reason}")


@contextlib.contextmanager
def context(device: torch.device) -> Iterator[None]:
    """Make torch's context on this GPU current in the thread: a new thread has none."""
    driver, before = library(), ctypes.c_void_p()
    expect(driver.cuCtxPushCurrent_v2(_primary_context(device)), f"to use {device}")
    try:
        yield
    finally:
        expect(driver.cuCtxPopCurrent_v2(ctypes.byref(before)), f"to leave {device}")


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index; threads may differ in their current device."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


class Bytes:
    """Memory at an address, which torch can view as a tensor; such tensors keep the object alive."""

    def __init__(self, address: int, size: int) -> None:
        layout = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None}
        self.__cuda_array_interface__ = {"version": 3, **layout}


def view(content: Bytes, device: torch.device) -> Tensor:
    """Return a tensor over memory of this GPU, without a copy."""
    return torch.as_tensor(content, device=device)


class ExportedMemory:
    """At least `size` bytes of a GPU that other processes can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        device = with_index(device)
        self.size = -(-size // _EXPORT_PAGE_BYTES) * _EXPORT_PAGE_BYTES
        driver, address, handle = library(), ctypes.c_uint64(), IpcHandle()
        with context(device):
            result = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            if result == OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # frees what torch has cached
                result = driver.cuMemAlloc_v2(ctypes.byref(address), self.size)
            expect(result, f"{self.size / 1e9:.2g} GB of memory")
            exported = driver.cuIpcGetMemHandle(ctypes.byref(handle), address)
            if exported != SUCCESS:
                driver.cuMemFree_v2(address)
            expect(exported, "to export memory")
        self.handle = bytes(handle)
        self.bytes = view(Bytes(address.value, self.size), device)


class OpenedMemory:
    """Memory that another process has exported; valid until it is closed, even if the exporter ends."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        self._device = with_index(device)
        address = ctypes.c_uint64()
        with context(self._device):
            opened = library().cuIpcOpenMemHandle_v2(
                ctypes.byref(address), IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS
            )
            expect(opened, "to open the memory of another process")
        self._address = address.value
        self.bytes = view(Bytes(self._address, size), self._device)

    def close(self) -> None:
        """Close the memory after all reads: using a tensor of it afterwards destroys the GPU context."""
        address, self._address = self._address, 0
        if address:
            with context(self._device):
                expect(library().cuIpcCloseMemHandle(address), "to close the memory of another process")


@cache
def _primary_context(device: torch.device) -> ctypes.c_void_p:
    """Retain the GPU's primary context, so that memory opened in it stays valid; torch may not have created it yet."""
    retained = ctypes.c_void_p()
    expect(library().cuDevicePrimaryCtxRetain(ctypes.byref(retained), _driver_index(device)), f"to use {device}")
    return retained


def _driver_index(device: torch.device) -> int:
    """Return the driver's handle of a GPU."""
    number = ctypes.c_int()
    expect(library().cuDeviceGet(ctypes.byref(number), device.index), f"to find {device}")
    return number.value
