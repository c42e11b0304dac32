"""A stand-in for the CUDA driver: "memory of the GPU" is a file that every process can map.

What it is for is who may read, write and free such memory, and when: that is the same between processes on a CPU.
Everything above the driver is the real thing.
"""
# ruff: noqa: N802 (the names are the driver's)

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.inference import cuda_driver
from headrace.inference.weights import link

REFUSED = 217
OUT_OF_MEMORY = 2


class HostDriver:
    """The calls that `ipc` makes. `room` is how many bytes can be had. Memory that is closed is gone from here."""

    def __init__(self, directory: Path, room: int = 1 << 30) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.room = room
        self.refuses_to_open = self.refuses_to_close = False
        self.attributes: dict[int, int] = {}
        self.open: dict[int, tuple[str, mmap.mmap, bool]] = {}
        """What this process has mapped: name, mapping and whether it is its own, by address."""
        self.depth = 0
        """Contexts that are pushed."""

    def cuGetErrorString(self, result: int, said: Any) -> int:
        said._obj.value = {OUT_OF_MEMORY: b"out of memory"}.get(result, b"it is refused")
        return 0

    def cuDeviceGet(self, number: Any, index: int | None) -> int:
        number._obj.value = index or 0
        return 0

    def cuDeviceGetAttribute(self, answer: Any, attribute: int, number: int) -> int:
        answer._obj.value = self.attributes.get(attribute, 0)
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.depth -= 1
        return 0

    def cuMemAlloc_v2(self, address: Any, size: int) -> int:
        if size > self.room:
            return OUT_OF_MEMORY
        name = secrets.token_hex(16)
        with open(self._directory / name, "wb") as file:
            file.truncate(size)
        address._obj.value = self._map(name, own=True)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        name, _, own = self.open.pop(_value(address))
        (self._directory / name).unlink()
        return 0 if own else REFUSED

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        handle._obj.reserved = self.open[_value(address)][0].encode()
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        name = handle.reserved.decode()
        is_own = any(own and name == opened for opened, _, own in self.open.values())
        if self.refuses_to_open or is_own or flags != 1 or not (self._directory / name).exists():
            return REFUSED
        address._obj.value = self._map(name, own=False)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        _, _, own = self.open.pop(_value(address))
        return REFUSED if own or self.refuses_to_close else 0

    def _map(self, name: str, own: bool) -> int:
        with open(self._directory / name, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.open[address] = (name, mapping, own)
        return address


def _value(address: Any) -> int:
    return int(getattr(address, "value", address))


def view(content: cuda_driver.Bytes, device: torch.device) -> torch.Tensor:
    interface = content.__cuda_array_interface__
    (size,), (address, _) = interface["shape"], interface["data"]
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def use(driver: HostDriver, gpu: str = "GPU-0", replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have this process take its CPU for a GPU, as far as sharing memory goes; `replace` may be a monkeypatch's."""
    replace(cuda_driver, "library", lambda: driver)
    replace(cuda_driver, "view", view)
    replace(cuda_driver, "with_index", lambda device: device)
    replace(link, "gpu_identity", lambda device: gpu)
