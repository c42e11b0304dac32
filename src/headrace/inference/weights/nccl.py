"""An NCCL group of two GPUs in different processes, through the NCCL library itself.

torch's NCCL groups end the whole process when the other side dies. A trainer must survive its engines and an engine its
trainer, so this module calls the library that torch has loaded in nonblocking mode: it polls for every call, and aborts
a group whose other side is gone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.errors import Failure

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_POLL_S = 0.0005

MAX_QUEUED_TRANSFERS = 2
"""Transfers that either member queues: one runs while the next is prepared."""


class NcclError(Failure):
    """An NCCL call failed; the message is NCCL's."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """The first fields of ncclConfig_t; the library uses its defaults for the others."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""NCCL 2.14, whose configuration had exactly these fields."""


@cache
def _library() -> Any:
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int),
        ctypes.POINTER(_Config),
    ]
    library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.ncclBroadcast.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ]
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    return library


def is_available() -> bool:
    """Return whether the NCCL library can be loaded."""
    try:
        _library()
    except OSError:
        return False
    return True


def new_group_id() -> bytes:
    """Return an id with which both members create a group."""
    unique = _UniqueId()
    _expect(_library().ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


class NcclPair:
    """A group of this process and another; member 0 sends, member 1 receives.

    `check(what, since)` is called while waiting, and raises to abort, e.g. at a timeout. An error during a wait closes
    the pair.
    """

    def __init__(self, group_id: bytes, member: int, device: torch.device, check: Callable[[str, float], None]) -> None:
        self._check = check
        self._comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        unique = _UniqueId.from_buffer_copy(group_id)
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """The stream of transfers; their memory may be used on it, or after `wait`."""
        comm = ctypes.byref(self._comm)
        with torch.cuda.device(device):
            created = _library().ncclCommInitRankConfig(comm, 2, unique, member, ctypes.byref(config))
            self._wait_for_call(created, "an NCCL group of the two")

    def transfer(self, row: Tensor, what: str) -> torch.cuda.Event:
        """Queue the transfer of a row of bytes from member 0 to member 1; returns the event of its end."""
        pointer, stream = row.data_ptr(), self.stream.cuda_stream
        with torch.cuda.device(self.device):
            queued = _library().ncclBroadcast(pointer, pointer, row.numel(), _UINT8, 0, self._comm, stream)
            self._wait_for_call(queued, what)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event, what: str) -> None:
        self._wait(event.query, what)

    def close(self) -> None:
        """Abort the group; queued rows are neither read nor written afterwards."""
        if self._comm:
            _library().ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()
            self.stream.synchronize()

    def _wait_for_call(self, result: int, what: str) -> None:
        """Wait for a nonblocking call."""
        self._wait(lambda: _expect(result) == _SUCCESS or self._state() == _SUCCESS, what)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Poll until something is done; an error closes the pair."""
        since = time.monotonic()
        try:
            while not is_done():
                self._state()
                self._check(what, since)
                time.sleep(_POLL_S)
        except BaseException:
            self.close()  # before the caller frees the memory of queued transfers
            raise

    def _state(self) -> int:
        state = ctypes.c_int()
        _expect(_library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        return _expect(state.value)


def _expect(result: int) -> int:
    """Return the result of a call. Raises `NcclError` unless it has succeeded or is in progress."""
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise NcclError(f"NCCL failed: {_library().ncclGetErrorString(result).decode()}")
    return result
