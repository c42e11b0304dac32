"""The weights link: engines fetch weights from the trainer's memory instead of from files. Manifest and protocol.

A version is published as usual, but its directory has a manifest in place of tensor files: the trainer's address, the
offset of each tensor in one byte buffer, and a digest of every bucket of that buffer. An engine connects, requests the
version, and receives a response and the buckets: over the same connection, or between GPUs by NCCL. On the trainer's
own GPU it receives a handle to memory with all buckets (CUDA IPC), and reports when it has released that.

Messages are JSON after four bytes of length. Every wait has a timeout, restarted for each chunk of a few megabytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from headrace.errors import Failure
from headrace.rollout.schema import SCHEMA, decode_versioned
from headrace.rollout.version import Version

T = TypeVar("T", bound=msgspec.Struct)
Carrier = Literal["stream", "nccl", "ipc"]

MANIFEST = "tensors.json"
TIMEOUT_S = 60.0
"""Default timeout of a chunk or a message."""
ALIGNMENT_BYTES = 16
"""Every tensor begins at a multiple of this, so that the bytes can be used in place."""
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 22
"""Bytes that a connection must transfer within the timeout."""
_CONNECT_ATTEMPT_S = 1.0
"""Timeout of one attempt to connect, so that connecting can be cancelled."""


class LinkBroken(Failure):
    """The peer closed the connection, timed out or sent an invalid message."""


class TensorSpan(msgspec.Struct):
    """A tensor in the byte buffer; `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class Manifest(msgspec.Struct):
    """The file of a published directory that replaces its tensor files."""

    host: str
    port: int
    sender: str
    """Id of this trainer process: another one may have the same address later."""
    tensors: list[TensorSpan]
    size: int
    """Bytes of the buffer, a multiple of the alignment."""
    bucket_size: int
    """Bytes of a bucket; the last may be smaller."""
    digests: list[int]
    """One for each bucket."""
    schema: int = SCHEMA

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each bucket in the buffer."""
        starts = range(0, self.size, self.bucket_size)
        return [(start, min(start + self.bucket_size, self.size)) for start in starts]


class LinkPeer(msgspec.Struct, frozen=True):
    """One end of the link, for choosing the carrier."""

    process: str = ""
    """Unique id of the process."""
    gpu: str | None = None
    """Unique id of the GPU that its weights are on, if any."""
    carriers: list[Carrier] = msgspec.field(default_factory=lambda: ["stream"])
    """The carriers that it supports."""


class FetchRequest(msgspec.Struct):
    """An engine's request for a version."""

    sender: str
    incarnation: int
    step: int
    engine: LinkPeer = LinkPeer()
    schema: int = SCHEMA

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)


class FetchResponse(msgspec.Struct):
    """The carrier by which the buckets follow; or a problem, and nothing follows."""

    carrier: Carrier = "stream"
    group: str = ""
    """NCCL's unique id for the group of the two, hexadecimal; empty if the group exists already."""
    memory: str = ""
    """CUDA IPC handle of the memory with all buckets, hexadecimal. The memory is unchanged until the engine sends
    `MemoryReleased` or disconnects."""
    problem: str = ""
    schema: int = SCHEMA


class MemoryReleased(msgspec.Struct):
    """An engine has closed the IPC memory of the last response."""

    schema: int = SCHEMA


def is_linked(directory: Path) -> bool:
    """Return whether the tensors of a published directory must be fetched over the link."""
    return (directory / MANIFEST).exists()


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    return decode_versioned(path.read_bytes(), Manifest, str(path))


class Connection:
    """A connection of the link. `peer` names the other side in errors."""

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer
        self.timeout_s = timeout_s
        self._socket = connected

    def send(self, message: msgspec.Struct) -> None:
        content = msgspec.json.encode(message)
        self.send_bytes(memoryview(_LENGTH.pack(len(content)) + content), "a message")

    def receive(self, kind: type[T], what: str) -> T:
        """Return the next message; raise `LinkBroken` after the timeout. `what` names it in errors."""
        header = bytearray(_LENGTH.size)
        self.receive_bytes(memoryview(header), what)
        (length,) = _LENGTH.unpack(header)
        if length > _MAX_MESSAGE_BYTES:
            raise LinkBroken(f"{self.peer} sent an invalid message instead of {what}")
        content = bytearray(length)
        self.receive_bytes(memoryview(content), what)
        return decode_versioned(bytes(content), kind, f"{what} from {self.peer}")

    def wait_for_message(self) -> bool:
        """Wait without timeout until a message begins to arrive; return False if the peer closed the connection."""
        self._socket.settimeout(None)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def send_bytes(self, content: memoryview, what: str) -> None:
        self._socket.settimeout(self.timeout_s)
        try:
            for start in range(0, len(content), _CHUNK_BYTES):
                self._socket.sendall(content[start : start + _CHUNK_BYTES])
        except TimeoutError as error:
            raise LinkBroken(f"waited {self.timeout_s:g} s for {self.peer} to take {what}") from error
        except OSError as error:
            raise self._closed(what) from error

    def receive_bytes(self, target: memoryview, what: str) -> None:
        """Fill `target`."""
        try:
            for start in range(0, len(target), _CHUNK_BYTES):
                chunk, deadline = target[start : start + _CHUNK_BYTES], time.monotonic() + self.timeout_s
                while len(chunk):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    self._socket.settimeout(left)
                    count = self._socket.recv_into(chunk)
                    if not count:
                        raise self._closed(what)
                    chunk = chunk[count:]
        except TimeoutError as error:
            raise LinkBroken(f"waited {self.timeout_s:g} s for {what} from {self.peer}") from error
        except OSError as error:
            raise self._closed(what) from error

    @property
    def is_open(self) -> bool:
        """Whether the peer has not closed the connection."""
        self._socket.settimeout(0)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def check(self, what: str, since: float) -> None:
        """Raise `LinkBroken` if the peer is gone or too slow while `what` is sent by another carrier."""
        if not self.is_open:
            raise self._closed(what)
        if time.monotonic() - since > self.timeout_s:
            raise LinkBroken(f"waited {self.timeout_s:g} s for {what} between this process and {self.peer}")

    def hang_up(self) -> None:
        """Shut the connection down: a thread that waits on it gets an error."""
        with contextlib.suppress(OSError):  # the peer has already closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()

    def _closed(self, what: str) -> LinkBroken:
        return LinkBroken(f"{self.peer} closed the connection before {what} was complete")


def connect(
    host: str, port: int, peer: str, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
) -> Connection:
    """Connect to a listening trainer; `is_cancelled` is called between attempts, so that another thread can stop it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connected = socket.create_connection((host, port), min(_CONNECT_ATTEMPT_S, timeout_s))
            return Connection(connected, peer, timeout_s)
        except OSError as error:
            if isinstance(error, TimeoutError) and time.monotonic() < deadline and not is_cancelled():
                continue
            raise LinkBroken(
                f"{peer} cannot be reached: {error}. Check trainer.weights.host, and that it is running"
            ) from error
