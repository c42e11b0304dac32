"""The receiver of the weights link: a published version out of the trainer's memory, into this process.

All of it is received and compared with the digests in the published directory before anybody sees it, so that what goes
wrong on the way leaves the model as it was. The connection, and with it NCCL's group, stays open for the next version;
it is made anew when the trainer, or the connection, is another one.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from headrace.inference.weights.errors import WeightsError
from headrace.inference.weights.errors import WeightsUnreachable as WeightsUnreachable
from headrace.inference.weights.nccl import AHEAD, NcclError, NcclPair, gpu_identity
from headrace.inference.weights.tensor_bytes import digest, tensors_in
from headrace.rollout.batch import SchemaError
from headrace.rollout.version import Version
from headrace.transport.weights_link import (
    PATIENCE,
    Answer,
    Ask,
    Connection,
    LinkBroken,
    Manifest,
    connect,
    read_manifest,
)


class WeightsReceiver:
    """An engine's end of the link. `receive` may be called from any thread; one version is fetched at a time."""

    def __init__(self, device: torch.device, *, patience: float = PATIENCE) -> None:
        self._device = device
        self._gpu = gpu_identity(device)
        self._patience = patience
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pair: NcclPair | None = None
        self._sender = ""
        self._closed = False

    def receive(self, directory: Path, version: Version) -> dict[str, Tensor]:
        """The tensors of a published directory that has a manifest in their place."""
        try:
            manifest = read_manifest(directory)
        except (OSError, SchemaError) as error:
            raise WeightsError(str(error)) from error
        with self._lock:
            try:
                row = self._fetch(manifest, version)
            except (LinkBroken, NcclError, SchemaError) as error:
                self._disconnect()
                raise WeightsUnreachable(f"weights {version} did not arrive: {error}") from error
        return tensors_in(row, manifest.tensors)

    def close(self) -> None:
        """Leave for good; whatever is being received, or waits to be, ends with an error."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.hang_up()
        with self._lock:
            self._disconnect()

    def _fetch(self, manifest: Manifest, version: Version) -> Tensor:
        connection = self._connected(manifest)
        connection.send(Ask(manifest.sender, version.incarnation, version.step, self._gpu))
        answer = connection.receive(Answer, f"the answer about weights {version}")
        if answer.problem:
            raise LinkBroken(answer.problem)
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
        for number, (start, end) in enumerate(manifest.spans):
            if int(digest(row[start:end])) != manifest.digests[number]:
                raise LinkBroken(f"they were damaged on the way: bucket {number + 1} is another one")
        return row

    def _room_for(self, size: int) -> Tensor:
        """On the GPU if it has plenty, since installing is then a matter of milliseconds; else on the host."""
        plenty = self._device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(self._device)[0]
        return torch.empty(size, dtype=torch.uint8, device=self._device if plenty else "cpu")

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
