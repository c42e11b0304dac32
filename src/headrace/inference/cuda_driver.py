"""The driver of GPUs, for what torch does not do: memory that another process opens, or that is given back for a while.

The calls with the types of their arguments, the context they are made in, their errors, and tensors over addresses.
Nothing here is loaded before somebody asks for it: most machines have no such driver.
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
"""The only flag there is for opening another process's memory; without it the driver refuses."""
PINNED, ON_DEVICE, READ_AND_WRITE, MINIMUM = 1, 1, 3, 0
_VIRTUAL_MEMORY = 102
"""What a GPU is asked for by this number: whether memory can be moved in and out behind its address."""


class DriverError(Failure):
    """The driver cannot do what it was asked for; the message is its own."""


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
    """The driver's calls. Each returns a result for `expect`."""
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
        raise DriverError("the GPU's driver does not begin")
    return driver


def is_available() -> bool:
    """Whether there is such a driver."""
    try:
        library()
    except (OSError, AttributeError, DriverError):  # AttributeError: one that is too old for a call
        return False
    return True


def has_virtual_memory(device: torch.device) -> bool:
    """Whether memory of this GPU can be given back while its address is kept."""
    if not is_available():
        return False
    answer = ctypes.c_int()
    asked = library().cuDeviceGetAttribute(ctypes.byref(answer), _VIRTUAL_MEMORY, _number(numbered(device)))
    return asked == SUCCESS and answer.value == 1


def expect(result: int, what: str) -> None:
    """Raise `DriverError` unless the call did what it was asked for."""
    if result != SUCCESS:
        said = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(said))
        why = said.value.decode() if said.value else f"error {result}"
        raise DriverError(f"the GPU's driver refused {what}: {why}")


@contextlib.contextmanager
def context(device: torch.device) -> Iterator[None]:
    """The context that torch has on this GPU becomes the thread's: to the driver a new thread has none."""
    driver, before = library(), ctypes.c_void_p()
    expect(driver.cuCtxPushCurrent_v2(_primary_context(device)), f"to use {device}")
    try:
        yield
    finally:
        expect(driver.cuCtxPopCurrent_v2(ctypes.byref(before)), f"to leave {device}")


def numbered(device: torch.device) -> torch.device:
    """Which one it is, as threads may differ about the current one."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


class Bytes:
    """What torch makes a tensor of without copying. Every such tensor keeps it alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def view(content: Bytes, device: torch.device) -> Tensor:
    """The tensor over memory of that GPU."""
    return torch.as_tensor(content, device=device)


@cache
def _primary_context(device: torch.device) -> ctypes.c_void_p:
    """Held for good: with its last holder it would go, and all that was opened in it. Torch may not hold it yet."""
    held = ctypes.c_void_p()
    expect(library().cuDevicePrimaryCtxRetain(ctypes.byref(held), _number(device)), f"to use {device}")
    return held


def _number(device: torch.device) -> int:
    """What the driver calls a GPU that torch numbers so."""
    number = ctypes.c_int()
    expect(library().cuDeviceGet(ctypes.byref(number), device.index), f"to find {device}")
    return number.value
