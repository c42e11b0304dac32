"""The weights link: the choice of a carrier, and the receiver, which fetches a version from the trainer's memory.

A version is received whole and compared with the digests in its published directory before it is used, so that a failed
transfer leaves the model unchanged. The connection, and with it the NCCL group, stays open for the next version; it is
renewed when the trainer changes or the connection breaks.

On a GPU that the trainer shares, nothing is copied: the trainer's memory is opened, and borrowed until the caller
releases it. It is opened and closed for each version, so that no memory of a dead trainer is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.errors import Failure
from headrace.inference import cuda_driver
from headrace.inference.cuda_driver import DriverError, OpenedMemory
from headrace.inference.weights import nccl
from headrace.inference.weights.buffers import digest, digests, free_staging, stage, view_tensors
from headrace.inference.weights.nccl import MAX_QUEUED_TRANSFERS, NcclError, NcclPair
from headrace.inference.weights.reading import WeightsError, WeightsUnreachable
from headrace.rollout.schema import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights_link import (
    TIMEOUT_S,
    Carrier,
    Connection,
    FetchRequest,
    FetchResponse,
    LinkBroken,
    LinkPeer,
    Manifest,
    MemoryReleased,
    connect,
    read_manifest,
)

log = logging.getLogger(__name__)

CarrierSetting = Literal["auto", "stream", "nccl", "ipc"]
"""The configured carrier; `auto` is the best available one."""
_NAMES = {"nccl": "NCCL", "ipc": "CUDA IPC"}


class CarrierUnavailable(Failure):
    """The configured carrier cannot be used."""


def describe_end(device: torch.device) -> LinkPeer:
    """Return this process's identity, GPU and carriers, for weights on `device`."""
    gpu = gpu_identity(device)
    carriers: list[Carrier] = ["stream"]
    if gpu is not None and nccl.is_available():
        carriers.append("nccl")
    if gpu is not None and cuda_driver.is_available():
        carriers.append("ipc")
    return LinkPeer(f"{socket.gethostname()}:{os.getpid()}", gpu, carriers)


def gpu_identity(device: torch.device) -> str | None:
    """Return the UUID of a GPU; None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def choose_carrier(setting: CarrierSetting, trainer: LinkPeer, engine: LinkPeer) -> Carrier:
    """Return the carrier from this trainer to this engine; raises `CarrierUnavailable`.

    Two processes on one GPU share memory. NCCL is for different GPUs: it refuses two ends on one unless it is made to
    see two hosts, so it is not chosen there, but can be configured. A stream always works.
    """
    if setting == "stream":
        return "stream"
    if setting != "auto":
        obstacle = _obstacle(setting, trainer, engine)
        if obstacle is not None:
            raise CarrierUnavailable(f"{_NAMES[setting]} is configured, but {obstacle}")
        return setting
    if _obstacle("ipc", trainer, engine) is None:
        return "ipc"
    return "nccl" if _obstacle("nccl", trainer, engine) is None and trainer.gpu != engine.gpu else "stream"


def _obstacle(carrier: Carrier, trainer: LinkPeer, engine: LinkPeer) -> str | None:
    """Return why a carrier cannot be used; None if it can."""
    for side, end in (("trainer", trainer), ("engine", engine)):
        if carrier not in end.carriers:
            return f"the {side} has no GPU that supports it"
    if carrier == "ipc" and trainer.gpu != engine.gpu:
        return "trainer and engine are on different GPUs"
    if carrier == "ipc" and trainer.process == engine.process:
        return "trainer and engine are the same process, which cannot open its own memory"
    return None


class Received(NamedTuple):
    """The tensors of a version, valid until they are released or another version is received."""

    tensors: dict[str, Tensor]
    release: Callable[[], None]


class WeightsReceiver:
    """An engine's end of the link; thread-safe, fetches one version at a time."""

    def __init__(self, device: torch.device, *, timeout_s: float = TIMEOUT_S) -> None:
        self._device = device
        self._end = describe_end(device)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pair: NcclPair | None = None
        self._borrowed: OpenedMemory | None = None
        self._sender = ""
        self._closed = False

    def receive(self, directory: Path, version: Version) -> Received:
        """Fetch the tensors of a published directory that has a manifest instead of them."""
        try:
            manifest = read_manifest(directory)
        except (OSError, SchemaError) as error:
            raise WeightsError(str(error)) from error
        with self._lock:
            try:
                self._return_borrowed()
                row = self._fetch(manifest, version)
                actual = self._digests(row, manifest.spans)
                for number, (ours, theirs) in enumerate(zip(actual, manifest.digests, strict=True), 1):
                    if ours != theirs:
                        raise LinkBroken(f"bucket {number} was damaged in transfer")
                return Received(view_tensors(row, manifest.tensors), partial(self._release, self._borrowed))
            except (LinkBroken, NcclError, DriverError, SchemaError, torch.OutOfMemoryError) as error:
                self._disconnect()
                raise WeightsUnreachable(f"weights {version} did not arrive: {error}") from error
            except BaseException:
                self._disconnect()  # the connection may have unread bytes
                raise

    def close(self) -> None:
        """Close the link; transfers end with an error, and borrowed memory stays valid until it is released."""
        self._closed = True
        if (connection := self._connection) is not None and self._borrowed is None:
            connection.hang_up()
        with self._lock:
            if self._borrowed is None:
                self._disconnect()

    def _release(self, borrowed: OpenedMemory | None) -> None:
        """Give the trainer's memory back, or free the staging memory."""
        if borrowed is None:
            free_staging(self._device)
            return
        with self._lock:
            if borrowed is not self._borrowed:
                return  # closed with its connection
            try:
                self._return_borrowed()
            except LinkBroken:  # the trainer is gone
                self._disconnect()
            if self._closed:
                self._disconnect()

    def _return_borrowed(self) -> None:
        """Close the trainer's memory, and notify the trainer."""
        if self._borrowed is not None:
            self._close_borrowed()
            if self._connection is not None:
                self._connection.send(MemoryReleased())

    def _close_borrowed(self) -> None:
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            try:
                borrowed.close()
            except DriverError as error:
                log.warning("%s", error)

    def _fetch(self, manifest: Manifest, version: Version) -> Tensor:
        """Return the bytes of a version, by the carrier that the trainer has chosen."""
        connection = self._connect(manifest)
        connection.send(FetchRequest(manifest.sender, version.incarnation, version.step, self._end))
        answer = connection.receive(FetchResponse, f"the answer about weights {version}")
        if answer.problem:
            raise LinkBroken(answer.problem)
        if answer.carrier == "ipc":
            row = self._open_memory(connection, answer, manifest.size)
            return self._fetch(manifest, version) if row is None else row
        if answer.group:
            self._pair = NcclPair(bytes.fromhex(answer.group), 1, self._device, connection.check)
        count = len(manifest.spans)
        buckets = [(f"bucket {n} of {count} of weights {version}", span) for n, span in enumerate(manifest.spans, 1)]
        size = manifest.size
        row = stage(self._device, size, lambda where: torch.empty(size, dtype=torch.uint8, device=where))
        if answer.carrier == "stream":
            _receive_stream(connection, row, buckets)
        elif self._pair is not None:
            _receive_nccl(self._pair, row, buckets)
        else:
            raise LinkBroken(f"{connection.peer} uses an NCCL group that was never created")
        return row

    def _open_memory(self, connection: Connection, answer: FetchResponse, size: int) -> Tensor | None:
        """Open the trainer's memory; None if it cannot be opened, and then other carriers are used from here on."""
        try:
            self._borrowed = OpenedMemory(bytes.fromhex(answer.memory), size, self._device)
            return self._borrowed.bytes
        except DriverError as error:
            log.warning(
                "weights are copied although the trainer is on the same GPU: its memory cannot be opened: %s", error
            )
            others = [carrier for carrier in self._end.carriers if carrier != "ipc"]
            self._end = msgspec.structs.replace(self._end, carriers=others)
            connection.send(MemoryReleased())
            return None

    def _digests(self, row: Tensor, spans: list[tuple[int, int]]) -> list[int]:
        """Compute digests on the GPU, in a stream of their own; on the host if the GPU is out of memory."""
        with contextlib.suppress(torch.OutOfMemoryError):
            if not row.is_cuda:
                return digests(row, spans)
            self._stream.wait_stream(torch.cuda.current_stream(row.device))
            with torch.cuda.stream(self._stream):
                return digests(row, spans)
        return [int(digest(row[start:end].cpu())) for start, end in spans]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One stream for all versions: torch does not reuse its memory for other streams."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _connect(self, manifest: Manifest) -> Connection:
        """Return an open connection to the trainer of a manifest, reusing the last one."""
        if self._connection is None or self._sender != manifest.sender or not self._connection.is_open:
            self._disconnect()
            peer = f"the trainer at {manifest.host}:{manifest.port}"
            self._connection = connect(manifest.host, manifest.port, peer, self._timeout_s, lambda: self._closed)
            self._sender = manifest.sender
        if self._closed:  # after `_connection` is set: `close` would have hung up otherwise
            raise LinkBroken("this end of the link is closed")
        return self._connection

    def _disconnect(self) -> None:
        self._close_borrowed()
        if self._pair is not None:
            self._pair.close()
        if self._connection is not None:
            self._connection.close()
        self._pair = self._connection = None


Buckets = list[tuple[str, tuple[int, int]]]
"""(description, (start, end)) of each bucket."""


def _receive_stream(connection: Connection, row: Tensor, buckets: Buckets) -> None:
    bounce = torch.empty(_largest(buckets), dtype=torch.uint8, pin_memory=True) if row.is_cuda else None
    for what, (start, end) in buckets:
        target = row[start:end] if bounce is None else bounce[: end - start]
        connection.receive_bytes(target.numpy().data, what)
        if bounce is not None:
            row[start:end].copy_(target)


def _receive_nccl(pair: NcclPair, row: Tensor, buckets: Buckets) -> None:
    if not row.is_cuda:
        bounce = torch.empty(_largest(buckets), dtype=torch.uint8, device=pair.device)
        for what, (start, end) in buckets:
            pair.wait(pair.transfer(bounce[: end - start], what), what)
            row[start:end].copy_(bounce[: end - start])
        return
    pair.stream.wait_stream(torch.cuda.current_stream(pair.device))  # for earlier uses of this memory
    queued: deque[tuple[torch.cuda.Event, str]] = deque()
    for what, (start, end) in buckets:
        if len(queued) == MAX_QUEUED_TRANSFERS:
            pair.wait(*queued.popleft())
        queued.append((pair.transfer(row[start:end], what), what))
    for event, what in queued:
        pair.wait(event, what)


def _largest(buckets: Buckets) -> int:
    return max(end - start for _, (start, end) in buckets)
