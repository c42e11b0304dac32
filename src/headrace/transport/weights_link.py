"""Weights that stay in the trainer's memory: what stands for them on disk, and what is said to fetch them.

A version that travels over the link is published like any other, but its directory has a manifest in place of tensor
files: who has the tensors, where each lies in one long row of bytes, and a digest of every bucket of that row. An
engine connects, asks for the version, and gets an answer and the buckets: down the same connection, or between GPUs by
NCCL. On the GPU that the trainer is on it gets a handle of memory that has them all, and says when it is done with it.

Messages are JSON after four bytes of length. Every wait is bounded by the patience of its side, counted anew for each
chunk of a few megabytes, and fails with a sentence that says who waited for what from whom.
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
from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.rollout.version import Version

T = TypeVar("T", bound=msgspec.Struct)
Carrier = Literal["stream", "nccl", "ipc"]

MANIFEST = "tensors.json"
PATIENCE = 60.0
"""Seconds that a chunk, or an answer, may take before either side gives the other up."""
ALIGNMENT = 16
"""Every tensor begins at a multiple of this, so that the bytes can be used where they lie."""
_LENGTH = struct.Struct("!I")
_LONGEST_MESSAGE = 1 << 20
_CHUNK = 1 << 22
"""Bytes that a slow connection must carry within the patience."""
_CONNECTING = 1.0
"""Seconds after which a connection that is not made yet is begun anew, if it is still wanted."""


class LinkBroken(Failure):
    """The other side is gone, silent, or says what it must not."""


class TensorPlace(msgspec.Struct):
    """A tensor in the row of bytes; `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class Manifest(msgspec.Struct):
    """What a published directory has in place of tensors."""

    host: str
    port: int
    sender: str
    """Tells this trainer from any other that may have the same address later."""
    tensors: list[TensorPlace]
    size: int
    """Bytes in all, a multiple of the alignment."""
    bucket_size: int
    """Of all buckets but the last, which is what remains."""
    digests: list[int]
    """One for each bucket."""
    schema: int = SCHEMA

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each bucket begins and ends."""
        starts = range(0, self.size, self.bucket_size)
        return [(start, min(start + self.bucket_size, self.size)) for start in starts]


class End(msgspec.Struct, frozen=True):
    """What one end of the link is, for choosing how versions travel."""

    process: str = ""
    """Tells it from every other process on the same GPU."""
    gpu: str | None = None
    """Tells the GPU that its weights are on from all others, if they are on one."""
    carriers: list[Carrier] = msgspec.field(default_factory=lambda: ["stream"])
    """What it can carry by."""


class Ask(msgspec.Struct):
    """An engine wants a version."""

    sender: str
    incarnation: int
    step: int
    engine: End = End()
    schema: int = SCHEMA

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.step)


class Answer(msgspec.Struct):
    """The buckets follow, by this carrier; or there is a problem, and nothing follows."""

    carrier: Carrier = "stream"
    group: str = ""
    """What NCCL needs to make the group of the two, in hexadecimal; empty if they have one already."""
    memory: str = ""
    """What opens the memory that has all buckets, one after the other, in hexadecimal. It stays as it is until the
    engine says that it is done, or is gone."""
    problem: str = ""
    schema: int = SCHEMA


class Done(msgspec.Struct):
    """An engine no longer has the memory open that it was told of."""

    schema: int = SCHEMA


def is_linked(directory: Path) -> bool:
    """Whether the tensors of a published directory are to be fetched over the link."""
    return (directory / MANIFEST).exists()


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    return decode_versioned(path.read_bytes(), Manifest, str(path))


class Connection:
    """One end of a link. `peer` is what errors call the other one."""

    def __init__(self, connected: socket.socket, peer: str, patience: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer
        self.patience = patience
        self._socket = connected

    def send(self, message: msgspec.Struct) -> None:
        content = msgspec.json.encode(message)
        self.send_bytes(memoryview(_LENGTH.pack(len(content)) + content), "a message")

    def receive(self, kind: type[T], what: str) -> T:
        """The next message, within the patience of this side."""
        header = bytearray(_LENGTH.size)
        self.receive_bytes(memoryview(header), what)
        (length,) = _LENGTH.unpack(header)
        if length > _LONGEST_MESSAGE:
            raise LinkBroken(f"{self.peer} sent something else in place of {what}")
        content = bytearray(length)
        self.receive_bytes(memoryview(content), what)
        return decode_versioned(bytes(content), kind, f"{what} from {self.peer}")

    def wait_for_message(self) -> bool:
        """Until one begins to arrive, however long that takes; False if the other side has closed instead."""
        self._socket.settimeout(None)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def send_bytes(self, content: memoryview, what: str) -> None:
        self._socket.settimeout(self.patience)
        try:
            for start in range(0, len(content), _CHUNK):
                self._socket.sendall(content[start : start + _CHUNK])
        except TimeoutError as error:
            raise LinkBroken(f"waited {self.patience:g} s for {self.peer} to take {what}") from error
        except OSError as error:
            raise self._lost(what) from error

    def receive_bytes(self, target: memoryview, what: str) -> None:
        """Fill `target`."""
        try:
            for start in range(0, len(target), _CHUNK):
                self._receive_chunk(target[start : start + _CHUNK], what)
        except TimeoutError as error:
            raise LinkBroken(f"waited {self.patience:g} s for {what} from {self.peer}") from error
        except OSError as error:
            raise self._lost(what) from error

    def _receive_chunk(self, target: memoryview, what: str) -> None:
        deadline = time.monotonic() + self.patience
        while len(target):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            count = self._socket.recv_into(target)
            if not count:
                raise self._lost(what)
            target = target[count:]

    @property
    def is_open(self) -> bool:
        """Whether the other side is still there, as far as this one has heard."""
        self._socket.settimeout(0)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def check(self, what: str, since: float) -> None:
        """While `what` travels by another way than this connection: raise if the other side is gone or too slow."""
        if not self.is_open:
            raise self._lost(what)
        if time.monotonic() - since > self.patience:
            raise LinkBroken(f"waited {self.patience:g} s for {what}, between here and {self.peer}")

    def hang_up(self) -> None:
        """End the conversation: whichever thread waits here gets an error."""
        with contextlib.suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()

    def _lost(self, what: str) -> LinkBroken:
        return LinkBroken(f"{self.peer} closed the connection before {what} was through")


def connect(
    host: str, port: int, peer: str, patience: float, is_given_up: Callable[[], bool] = lambda: False
) -> Connection:
    """A connection to whoever listens there. Where nobody answers, another thread may give it up."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Connection(socket.create_connection((host, port), min(_CONNECTING, patience)), peer, patience)
        except OSError as error:
            if isinstance(error, TimeoutError) and time.monotonic() < deadline and not is_given_up():
                continue
            raise LinkBroken(
                f"{peer} cannot be reached: {error}: is it running, and does trainer.weights.host lead to it from here?"
            ) from error
