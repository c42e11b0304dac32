"""The sender of the weights link: serves published versions from the trainer's memory to engines.

A version is copied once to the memory of the first rank's host, so that training continues while engines fetch it, each
over its own connection and thread. An engine that dies, hangs or sends garbage loses its connection; training is not
affected. A version is served as long as its directory exists.

An engine on the trainer's GPU opens the memory of the newest version (CUDA IPC) instead, until it reports that it has
released it; older versions are on the host by then. That memory is allocated at the start (`allocate_shared`) if such
engines are configured, or once one has connected.

Left out on purpose: one broadcast to all engines, where each would wait for the slowest.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.errors import BadInput, Failure
from headrace.inference.cuda_driver import DriverError
from headrace.inference.weights.link import CarrierSetting, CarrierUnavailable, choose_carrier, describe_end
from headrace.inference.weights.nccl import MAX_QUEUED_TRANSFERS, NcclPair, new_group_id
from headrace.rollout.version import Version
from headrace.trainer.snapshot import SharedBuffer, Snapshot
from headrace.transport.weights_link import (
    MANIFEST,
    TIMEOUT_S,
    Connection,
    FetchRequest,
    FetchResponse,
    Manifest,
    MemoryReleased,
)

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 1.0
"""Pause after a failure to accept a connection."""


class WeightsSender:
    """Listens for engines and serves the offered versions, on the first rank.

    `device` is that of the model. `carrier` is `auto` for shared memory on one GPU, NCCL between GPUs and a TCP stream
    otherwise, or the name of one of the three.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | None = None,
        carrier: CarrierSetting = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._end = describe_end(self._device)
        self._carrier = carrier
        self._is_shared = carrier == "ipc"
        """Whether an engine on the same GPU has connected, or is configured."""
        self._buffer: SharedBuffer | None = None
        self._timeout_s = timeout_s
        self._offers: dict[Version, Snapshot] = {}
        self._connections: set[Connection] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._id = secrets.token_hex(8)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            fact = f"cannot listen on {host}:{port} (trainer.weights.host, trainer.weights.port): {error.strerror}"
            fix = "Choose another; 0 takes any free one."
            raise BadInput(fact, key="trainer.weights.port", value=port, fix=fix) from error
        self._host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self._port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="weights-link", daemon=True).start()

    def allocate_shared(self, size: int) -> None:
        """Allocate memory for versions of `size` bytes for engines on this GPU, before the memory plan is made.

        No effect if memory cannot be shared or another carrier is configured.
        """
        if self._buffer is not None or self._carrier not in ("auto", "ipc") or "ipc" not in self._end.carriers:
            return
        try:
            self._buffer = SharedBuffer(size, self._device)
        except DriverError as error:
            log.warning("engines on this GPU fetch their weights through the host: %s", error)
            others = [carrier for carrier in self._end.carriers if carrier != "ipc"]
            self._end = msgspec.structs.replace(self._end, carriers=others)

    def writable_buffer(self, size: Callable[[], int]) -> SharedBuffer | None:
        """Return the buffer for the next version, ready to be written, if there are engines on this GPU."""
        if self._buffer is None and self._is_shared and "ipc" in self._end.carriers:
            self.allocate_shared(size())
        if self._buffer is not None and not self._buffer.begin_write():
            log.warning("an engine is still reading the last version: this one is sent through the host")
            return None
        return self._buffer

    def offer(self, version: Version, snapshot: Snapshot, directory: Path) -> None:
        """Serve a version from now on, and write its manifest into the directory that will be published."""
        with self._lock:
            self._offers[version] = snapshot
        size = sum(len(bucket) for bucket in snapshot.buckets)
        manifest = Manifest(
            self._host, self._port, self._id, snapshot.spans, size, len(snapshot.buckets[0]), snapshot.digests
        )
        (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    def keep(self, versions: Collection[Version]) -> None:
        """Stop serving all other versions; transfers in progress are completed."""
        with self._lock:
            self._offers = {version: snapshot for version, snapshot in self._offers.items() if version in versions}

    def close(self) -> None:
        """Close all connections. Memory that engines may be reading is kept until this process ends."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.hang_up()
        with contextlib.suppress(OSError):  # not supported for listening sockets everywhere
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        """Serve each engine that connects in its own thread."""
        while True:
            connected: socket.socket | None = None
            try:
                connected, address = self._listener.accept()
                connection = Connection(connected, f"the engine at {address[0]}:{address[1]}", self._timeout_s)
                threading.Thread(target=self._serve, args=(connection,), name="weights-link", daemon=True).start()
            except (OSError, RuntimeError) as error:  # no more files, no more threads
                if connected is not None:
                    connected.close()
                if self._closed:
                    return
                log.warning("an engine could not connect to the weights link: %s", error)
                time.sleep(ACCEPT_RETRY_S)

    def _serve(self, connection: Connection) -> None:
        """Handle the requests of one engine until it disconnects."""
        channel = _EngineChannel(connection, self._device)
        with self._lock:
            self._connections.add(connection)
            if self._closed:
                connection.hang_up()
        try:
            while connection.wait_for_message():
                request = connection.receive(FetchRequest, "a request")
                channel.send(request.version, *self._respond(request))
        except Failure as error:
            log.warning("the weights link to an engine is closed: %s", error)
        except Exception:  # such as out of memory
            log.exception("the weights link to %s is closed", connection.peer)
        finally:
            channel.close()
            with self._lock:
                self._connections.discard(connection)

    def _respond(self, request: FetchRequest) -> tuple[FetchResponse, Snapshot | None]:
        """Return the response to a request, and the snapshot to send after it, unless there is a problem."""
        with self._lock:
            snapshot = self._offers.get(request.version)
            offered = ", ".join(map(str, sorted(self._offers)))
        if request.sender != self._id:
            return FetchResponse(problem="another trainer than the one that published it listens there now"), None
        if snapshot is None:
            return FetchResponse(problem=f"the trainer has no such version any more; it has {offered or 'none'}"), None
        try:
            carrier = choose_carrier(self._carrier, self._end, request.engine)
        except CarrierUnavailable as error:
            return FetchResponse(problem=str(error)), None
        self._is_shared = self._is_shared or carrier == "ipc"
        return FetchResponse(carrier), snapshot


class _EngineChannel:
    """The connection of one engine, and the NCCL group with it once there is one."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection, self._device = connection, device
        self._pair: NcclPair | None = None

    def send(self, version: Version, response: FetchResponse, snapshot: Snapshot | None) -> None:
        """Send a response and the buckets of the snapshot, if any."""
        if snapshot is not None and response.carrier == "ipc":
            with snapshot.lend() as memory:
                if memory is not None:
                    response.memory = memory
                    self._connection.send(response)
                    if self._connection.wait_for_message():  # without timeout; False: the engine is gone
                        self._connection.receive(MemoryReleased, "the release of the memory")
                    return
            response.carrier = "stream"  # published without the buffer, or replaced in it
        if response.carrier == "nccl" and self._pair is None:
            response.group = new_group_id().hex()
        self._connection.send(response)
        if snapshot is None:
            return
        snapshot.wait()
        if response.carrier == "stream":
            for what, bucket in _describe_buckets(snapshot, version):
                self._connection.send_bytes(bucket.numpy().data, what)
            return
        if self._pair is None:
            self._pair = NcclPair(bytes.fromhex(response.group), 0, self._device, self._connection.check)
        self._send_by_nccl(self._pair, snapshot, version)

    def _send_by_nccl(self, pair: NcclPair, snapshot: Snapshot, version: Version) -> None:
        staging = [torch.empty_like(snapshot.buckets[0], device=self._device) for _ in range(MAX_QUEUED_TRANSFERS)]
        in_flight: deque[tuple[torch.cuda.Event, str]] = deque()
        for number, (what, bucket) in enumerate(_describe_buckets(snapshot, version)):
            if len(in_flight) == MAX_QUEUED_TRANSFERS:
                pair.wait(*in_flight.popleft())
            row = staging[number % MAX_QUEUED_TRANSFERS][: len(bucket)]
            with torch.cuda.stream(pair.stream):
                row.copy_(bucket, non_blocking=True)
            in_flight.append((pair.transfer(row, what), what))
        for event, what in in_flight:
            pair.wait(event, what)

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._connection.close()


def _describe_buckets(snapshot: Snapshot, version: Version) -> Iterable[tuple[str, Tensor]]:
    count = len(snapshot.buckets)
    return ((f"bucket {n} of {count} of weights {version}", bucket) for n, bucket in enumerate(snapshot.buckets, 1))
