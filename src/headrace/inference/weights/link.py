"""The receiver of the weights link: a published version out of the trainer's memory, into this process.

All of it is received and compared with the digests in the published directory before anybody sees it, so that what goes
wrong on the way leaves the model as it was. The connection, and with it NCCL's group, stays open for the next version;
it is made anew when the trainer, or the connection, is another one.

On a GPU that the trainer shares nothing is received: the trainer's memory is opened and lent to whoever asked, until
that one releases it. It is opened for each version and closed after it, so that a trainer that dies leaves none of its
memory behind here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.inference.cuda_driver import DriverError
from headrace.inference.weights.carriers import this_end
from headrace.inference.weights.errors import WeightsError
from headrace.inference.weights.errors import WeightsUnreachable as WeightsUnreachable
from headrace.inference.weights.ipc import OpenedMemory
from headrace.inference.weights.nccl import AHEAD, NcclError, NcclPair
from headrace.inference.weights.staging import leave_staging, staged
from headrace.inference.weights.tensor_bytes import digest, digests, tensors_in
from headrace.rollout.batch import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights_link import (
    TIMEOUT_S,
    Connection,
    FetchRequest,
    FetchResponse,
    LinkBroken,
    Manifest,
    MemoryReleased,
    connect,
    read_manifest,
)

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """The tensors of a version. Nobody may use them once they are released, nor once another version is asked for."""

    tensors: dict[str, Tensor]
    release: Callable[[], None]


class WeightsReceiver:
    """An engine's end of the link. `receive` may be called from any thread; one version is fetched at a time."""

    def __init__(self, device: torch.device, *, patience: float = TIMEOUT_S) -> None:
        self._device = device
        self._end = this_end(device)
        self._patience = patience
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pair: NcclPair | None = None
        self._lent: OpenedMemory | None = None
        self._sender = ""
        self._closed = False

    def receive(self, directory: Path, version: Version) -> Received:
        """The tensors of a published directory that has a manifest in their place."""
        try:
            manifest = read_manifest(directory)
        except (OSError, SchemaError) as error:
            raise WeightsError(str(error)) from error
        with self._lock:
            try:
                self._hand_back()
                row = self._fetch(manifest, version)
                self._verify(row, manifest)
                return Received(tensors_in(row, manifest.tensors), partial(self._release, self._lent))
            except (LinkBroken, NcclError, DriverError, SchemaError, torch.OutOfMemoryError) as error:
                self._disconnect()
                raise WeightsUnreachable(f"weights {version} did not arrive: {error}") from error
            except BaseException:
                self._disconnect()  # whoever comes next shall not find it half read
                raise

    def close(self) -> None:
        """Leave for good; whatever is being received, or waits to be, ends with an error. What is lent stays so."""
        self._closed = True
        if (connection := self._connection) is not None and self._lent is None:
            connection.hang_up()
        with self._lock:
            if self._lent is None:
                self._disconnect()

    def _release(self, lent: OpenedMemory | None) -> None:
        if lent is None:
            leave_staging(self._device)
            return
        with self._lock:
            if lent is not self._lent:
                return  # it went with its connection
            try:
                self._hand_back()
            except LinkBroken:  # the trainer is gone, and needs no word
                self._disconnect()
            if self._closed:
                self._disconnect()

    def _hand_back(self) -> None:
        """Close the trainer's memory, then say so."""
        if self._lent is not None:
            self._close_lent()
            if self._connection is not None:
                self._connection.send(MemoryReleased())

    def _close_lent(self) -> None:
        """Whatever the driver says, nobody here uses it any more."""
        lent, self._lent = self._lent, None
        if lent is not None:
            try:
                lent.close()
            except DriverError as error:
                log.warning("%s", error)

    def _fetch(self, manifest: Manifest, version: Version) -> Tensor:
        connection = self._connected(manifest)
        connection.send(FetchRequest(manifest.sender, version.incarnation, version.step, self._end))
        answer = connection.receive(FetchResponse, f"the answer about weights {version}")
        if answer.problem:
            raise LinkBroken(answer.problem)
        if answer.carrier == "ipc":
            row = self._open(connection, answer, manifest.size)
            return self._fetch(manifest, version) if row is None else row
        if answer.group:
            self._pair = NcclPair(bytes.fromhex(answer.group), 1, self._device, connection.check)
        count = len(manifest.spans)
        named = [(f"bucket {n} of {count} of weights {version}", span) for n, span in enumerate(manifest.spans, 1)]
        row = self._room_for(manifest.size)
        if answer.carrier == "stream":
            _receive_down(connection, row, named)
        elif self._pair is not None:
            _receive_by(self._pair, row, named)
        else:
            raise LinkBroken(f"{connection.peer} means an NCCL group that was never made")
        return row

    def _open(self, connection: Connection, answer: FetchResponse, size: int) -> Tensor | None:
        """The trainer's memory; None where it cannot be opened from here, and is not to be tried again."""
        try:
            self._lent = OpenedMemory(bytes.fromhex(answer.memory), size, self._device)
            return self._lent.bytes
        except DriverError as error:
            log.warning("weights come down a connection, although the trainer is on the same GPU: %s", error)
            others = [carrier for carrier in self._end.carriers if carrier != "ipc"]
            self._end = msgspec.structs.replace(self._end, carriers=others)
            connection.send(MemoryReleased())
            return None

    def _verify(self, row: Tensor, manifest: Manifest) -> None:
        """All of it is compared before any of it is used."""
        found = self._digests(row, manifest.spans)
        for number, (here, there) in enumerate(zip(found, manifest.digests, strict=True), 1):
            if here != there:
                raise LinkBroken(f"they were damaged on the way: bucket {number} is another one")

    def _digests(self, row: Tensor, spans: list[tuple[int, int]]) -> list[int]:
        """On a GPU, beside whatever it computes; where that has no room for it, here."""
        with contextlib.suppress(torch.OutOfMemoryError):
            if not row.is_cuda:
                return digests(row, spans)
            self._stream.wait_stream(torch.cuda.current_stream(row.device))
            with torch.cuda.stream(self._stream):
                return digests(row, spans)
        return [int(digest(row[start:end].cpu())) for start, end in spans]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all versions: torch keeps what was allocated for a stream for that stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _room_for(self, size: int) -> Tensor:
        return staged(self._device, size, lambda where: torch.empty(size, dtype=torch.uint8, device=where))

    def _connected(self, manifest: Manifest) -> Connection:
        """The connection to this very trainer: the one there is, if it still is one."""
        if self._connection is None or self._sender != manifest.sender or not self._connection.is_open:
            self._disconnect()
            peer = f"the trainer at {manifest.host}:{manifest.port}"
            self._connection = connect(manifest.host, manifest.port, peer, self._patience, lambda: self._closed)
            self._sender = manifest.sender
        if self._closed:  # after the connection is known, which `close` would else have hung up
            raise LinkBroken("this end of the link is closed")
        return self._connection

    def _disconnect(self) -> None:
        self._close_lent()
        if self._pair is not None:
            self._pair.close()
        if self._connection is not None:
            self._connection.close()
        self._pair = self._connection = None


Named = list[tuple[str, tuple[int, int]]]
"""Where each bucket goes, and what it is called."""


def _receive_down(connection: Connection, row: Tensor, named: Named) -> None:
    if not row.is_cuda:
        target = row.numpy().data
        for what, (start, end) in named:
            connection.receive_bytes(target[start:end], what)
        return
    bounce = torch.empty(_largest(named), dtype=torch.uint8, pin_memory=True)
    target = bounce.numpy().data
    for what, (start, end) in named:
        connection.receive_bytes(target[: end - start], what)
        row[start:end].copy_(bounce[: end - start])


def _receive_by(pair: NcclPair, row: Tensor, named: Named) -> None:
    if not row.is_cuda:
        bounce = torch.empty(_largest(named), dtype=torch.uint8, device=pair.device)
        for what, (start, end) in named:
            pair.wait(pair.transfer(bounce[: end - start], what), what)
            row[start:end].copy_(bounce[: end - start])
        return
    pair.stream.wait_stream(torch.cuda.current_stream(pair.device))  # whatever used this memory before
    under_way: deque[tuple[torch.cuda.Event, str]] = deque()
    for what, (start, end) in named:
        if len(under_way) == AHEAD:
            pair.wait(*under_way.popleft())
        under_way.append((pair.transfer(row[start:end], what), what))
    for event, what in under_way:
        pair.wait(event, what)


def _largest(named: Named) -> int:
    return max(end - start for _, (start, end) in named)
