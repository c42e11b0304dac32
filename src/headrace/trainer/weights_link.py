"""The sender of the weights link: published versions out of the trainer's memory, to any engine that asks.

What is published is copied once, into the memory of the first rank's host, so that training goes on while engines fetch
it, each over a connection and on a thread of its own. An engine that dies, hangs or lies costs its connection, and
training nothing. A version is served for as long as its directory is there: who reads the one can have the other.

Left out on purpose: one transfer for all engines at once, which would make each wait for the slowest; and memory that
trainer and engine share on one GPU, where the bytes go through the host.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.errors import BadInput, Failure
from headrace.inference.weights.nccl import AHEAD, NcclPair, gpu_identity, new_group_id
from headrace.inference.weights.tensor_bytes import bytes_of, digest
from headrace.rollout.version import Version
from headrace.transport.weights_link import (
    ALIGNMENT,
    MANIFEST,
    PATIENCE,
    Answer,
    Ask,
    Connection,
    Manifest,
    TensorPlace,
)

log = logging.getLogger(__name__)

BUCKET_SIZE = 1 << 26
"""Bytes that travel at once. A power of two, since torch rounds pinned memory up to one."""
RETRY = 1.0
"""Seconds of rest when the system cannot take another connection."""


class Snapshot(NamedTuple):
    """The tensors of one version, as a row of bytes in the memory of this host."""

    places: list[TensorPlace]
    buckets: list[Tensor]
    digests: list[int]


def take_snapshot(tensors: Iterable[tuple[str, Tensor]], bucket_size: int = BUCKET_SIZE) -> Snapshot:
    """Copy tensors, one after the other, as they are: whole, and in the type that engines want."""
    places = []
    row: _Row | None = None
    for name, tensor in tensors:
        row = row or _Row(bucket_size, tensor.device)
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, dtype, list(tensor.shape), row.size))
        row.append(bytes_of(tensor))
    if row is None:
        raise ValueError("there are no tensors to publish")
    buckets, digests = row.finish()
    return Snapshot(places, buckets, digests)


class _Row:
    """A row of bytes that grows, bucket by bucket. A bucket is filled where the tensors are, then kept on the host."""

    def __init__(self, bucket_size: int, device: torch.device) -> None:
        self.size = 0
        self._bucket_size = bucket_size
        self._device = device
        self._open: Tensor | None = None
        self._used = 0
        self._buckets: list[Tensor] = []
        self._digests: list[Tensor] = []

    def append(self, content: Tensor) -> None:
        """Add bytes, and zeros up to the next place where a tensor may begin."""
        padding = -len(content) % ALIGNMENT
        self.size += len(content) + padding
        while len(content):
            room = self._room()
            piece = content[: len(room)]
            room[: len(piece)].copy_(piece)
            self._advance(len(piece))
            content = content[len(piece) :]
        if padding:
            self._room()[:padding].zero_()
            self._advance(padding)

    def finish(self) -> tuple[list[Tensor], list[int]]:
        if self._open is not None:
            self._seal(self._open[: self._used])
        digests: list[int] = torch.stack(self._digests).tolist()  # waits until the last copy to the host is done
        return self._buckets, digests

    def _room(self) -> Tensor:
        """What is left of the bucket that is being filled."""
        if self._open is None:
            self._open, self._used = torch.empty(self._bucket_size, dtype=torch.uint8, device=self._device), 0
        return self._open[self._used :]

    def _advance(self, count: int) -> None:
        self._used += count
        if self._open is not None and self._used == self._bucket_size:
            self._seal(self._open)

    def _seal(self, full: Tensor) -> None:
        if self._device.type == "cuda":
            kept = torch.empty(len(full), dtype=torch.uint8, pin_memory=True)
            kept.copy_(full, non_blocking=True)
        else:
            kept = full
        self._buckets.append(kept)
        self._digests.append(digest(full))
        self._open = None


class WeightsSender:
    """Listens for engines, and serves the versions on offer. Only the first rank has one.

    `device` is where NCCL may send from. `carrier` is `auto` for NCCL between different GPUs and a plain stream
    otherwise, or the name of one of the two.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | None = None,
        carrier: Literal["auto", "stream", "nccl"] = "auto",
        patience: float = PATIENCE,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._gpu = gpu_identity(self._device)
        self._carrier = carrier
        self._patience = patience
        self._offers: dict[Version, Snapshot] = {}
        self._connections: set[Connection] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._id = secrets.token_hex(8)
        self._listener = _listen(host, port)
        self._host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self._port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="weights-link", daemon=True).start()

    def offer(self, version: Version, snapshot: Snapshot, directory: Path) -> None:
        """Serve a version from now on, and write what leads to it into the directory that is to be published."""
        with self._lock:
            self._offers[version] = snapshot
        size = sum(len(bucket) for bucket in snapshot.buckets)
        manifest = Manifest(
            self._host,
            self._port,
            self._id,
            snapshot.places,
            size,
            len(snapshot.buckets[0]),
            snapshot.digests,
        )
        (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    def keep(self, versions: Collection[Version]) -> None:
        """Forget all others. Whoever is being sent one gets the rest of it."""
        with self._lock:
            self._offers = {version: snapshot for version, snapshot in self._offers.items() if version in versions}

    def close(self) -> None:
        """Cut all connections."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.hang_up()
        with contextlib.suppress(OSError):  # not everywhere can this be said to a socket that only listens
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                self._welcome(*self._listener.accept())
            except (OSError, RuntimeError) as error:  # no more files, no more threads
                if self._closed:
                    return
                log.warning("an engine could not connect to the weights link: %s", error)
                time.sleep(RETRY)

    def _welcome(self, connected: socket.socket, address: tuple[Any, ...]) -> None:
        """Serve an engine on a thread of its own."""
        try:
            connection = Connection(connected, f"the engine at {address[0]}:{address[1]}", self._patience)
            threading.Thread(target=self._serve, args=(connection,), name="weights-link", daemon=True).start()
        except BaseException:
            connected.close()
            raise

    def _serve(self, connection: Connection) -> None:
        """Answer one engine until it goes."""
        line = _Line(connection, self._device)
        with self._lock:
            self._connections.add(connection)
            if self._closed:
                connection.hang_up()
        try:
            while connection.wait_for_message():
                ask = connection.receive(Ask, "what it wants")
                line.send(ask.version, *self._answer(ask))
        except Failure as error:
            log.warning("the weights link to an engine is cut: %s", error)
        except Exception:  # out of memory, say
            log.exception("the weights link to %s is cut", connection.peer)
        finally:
            line.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, ask: Ask) -> tuple[Answer, Snapshot | None]:
        with self._lock:
            snapshot = self._offers.get(ask.version)
            offered = ", ".join(map(str, sorted(self._offers)))
        if ask.sender != self._id:
            return Answer(problem="another trainer listens there now than the one that published it"), None
        if snapshot is None:
            return Answer(problem=f"the trainer has no such version any more; it has {offered or 'none'}"), None
        if self._carrier == "nccl" and (self._gpu is None or ask.gpu is None):
            where = "the trainer" if self._gpu is None else "the engine"
            return Answer(problem=f"NCCL is asked for by configuration, and {where} has no GPU that it can use"), None
        alone = self._gpu is None or ask.gpu is None or (self._carrier == "auto" and self._gpu == ask.gpu)
        return Answer("stream" if alone or self._carrier == "stream" else "nccl"), snapshot


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(
            f"cannot listen on trainer.weights.host {host}, trainer.weights.port {port}: {error.strerror}"
        ) from error


class _Line:
    """One engine's connection, and the NCCL group beside it once there is one."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device
        self._pair: NcclPair | None = None

    def send(self, version: Version, answer: Answer, snapshot: Snapshot | None) -> None:
        if answer.carrier == "nccl" and self._pair is None:
            answer.group = new_group_id().hex()
        self._connection.send(answer)
        if snapshot is None:
            return
        if answer.carrier == "stream":
            for what, bucket in _named(snapshot, version):
                self._connection.send_bytes(bucket.numpy().data, what)
            return
        if self._pair is None:
            self._pair = NcclPair(bytes.fromhex(answer.group), 0, self._device, self._connection.check)
        self._send_by(self._pair, snapshot, version)

    def _send_by(self, pair: NcclPair, snapshot: Snapshot, version: Version) -> None:
        staging = [torch.empty_like(snapshot.buckets[0], device=self._device) for _ in range(AHEAD)]
        under_way: deque[tuple[torch.cuda.Event, str]] = deque()
        for number, (what, bucket) in enumerate(_named(snapshot, version)):
            if len(under_way) == AHEAD:
                pair.wait(*under_way.popleft())
            row = staging[number % AHEAD][: len(bucket)]
            with torch.cuda.stream(pair.stream):
                row.copy_(bucket, non_blocking=True)
            under_way.append((pair.transfer(row, what), what))
        for event, what in under_way:
            pair.wait(event, what)

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._connection.close()


def _named(snapshot: Snapshot, version: Version) -> Iterable[tuple[str, Tensor]]:
    count = len(snapshot.buckets)
    return ((f"bucket {n} of {count} of weights {version}", bucket) for n, bucket in enumerate(snapshot.buckets, 1))
