"""The sender of the weights link: published versions out of the trainer's memory, to any engine that asks.

What is published is copied once, into the memory of the first rank's host, so that training goes on while engines fetch
it, each over a connection and on a thread of its own. An engine that dies, hangs or lies costs its connection, and
training nothing. A version is served for as long as its directory is there: who reads the one can have the other.

An engine on the GPU that the trainer is on gets no bytes: versions are laid out in memory that it can open, and it is
lent the newest until it says that it is done. What was laid out before has gone to the host meanwhile. That memory is
taken when somebody knows of such engines (`share`), or once one has asked.

Left out on purpose: one transfer for all engines at once, which would make each wait for the slowest.
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
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.errors import BadInput, Failure
from headrace.inference.cuda_driver import DriverError
from headrace.inference.weights.carriers import CarrierSetting, CarrierUnavailable, choose_carrier, describe_end
from headrace.inference.weights.nccl import MAX_QUEUED_TRANSFERS, NcclPair, new_group_id
from headrace.rollout.version import Version
from headrace.trainer.shared_row import SharedRow
from headrace.trainer.snapshot import Snapshot
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

RETRY = 1.0
"""Seconds of rest when the system cannot take another connection."""


class WeightsSender:
    """Listens for engines, and serves the versions on offer. Only the first rank has one.

    `device` is where the model is. `carrier` is `auto` for shared memory on one GPU, NCCL between different ones and a
    plain stream otherwise, or the name of one of the three.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | None = None,
        carrier: CarrierSetting = "auto",
        patience: float = TIMEOUT_S,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._end = describe_end(self._device)
        self._carrier = carrier
        self._is_shared = carrier == "ipc"
        """Whether an engine has its weights on the same GPU, as far as is known."""
        self._row: SharedRow | None = None
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

    def share(self, size: int) -> None:
        """Take memory for versions of that size now, before anybody plans with what is free: engines are on this GPU.

        Without effect where memory cannot be shared, or is not to be.
        """
        if self._row is not None or self._carrier not in ("auto", "ipc") or "ipc" not in self._end.carriers:
            return
        try:
            self._row = SharedRow(size, self._device)
        except DriverError as error:
            log.warning("engines on this GPU get their weights through the host: %s", error)
            others = [carrier for carrier in self._end.carriers if carrier != "ipc"]
            self._end = msgspec.structs.replace(self._end, carriers=others)

    def vacant_row(self, size: Callable[[], int]) -> SharedRow | None:
        """Where the next version, of that size, is to be laid out for engines on this GPU; None if nowhere."""
        if self._row is None and self._is_shared and "ipc" in self._end.carriers:
            self.share(size())
        if self._row is not None and not self._row.vacate():
            log.warning("an engine still reads the last version: this one goes through the host")
            return None
        return self._row

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
        """Cut all connections. Memory that engines can open stays while this process lasts: they may be reading it."""
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
                ask = connection.receive(FetchRequest, "what it wants")
                line.send(ask.version, *self._answer(ask))
        except Failure as error:
            log.warning("the weights link to an engine is cut: %s", error)
        except Exception:  # out of memory, say
            log.exception("the weights link to %s is cut", connection.peer)
        finally:
            line.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, ask: FetchRequest) -> tuple[FetchResponse, Snapshot | None]:
        with self._lock:
            snapshot = self._offers.get(ask.version)
            offered = ", ".join(map(str, sorted(self._offers)))
        if ask.sender != self._id:
            return FetchResponse(problem="another trainer listens there now than the one that published it"), None
        if snapshot is None:
            return FetchResponse(problem=f"the trainer has no such version any more; it has {offered or 'none'}"), None
        try:
            carrier = choose_carrier(self._carrier, self._end, ask.engine)
        except CarrierUnavailable as error:
            return FetchResponse(problem=str(error)), None
        self._is_shared = self._is_shared or carrier == "ipc"
        return FetchResponse(carrier), snapshot


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(
            f"cannot listen on {host}:{port} (trainer.weights.host, trainer.weights.port): {error.strerror}",
            key="trainer.weights.port",
            value=port,
            fix="Choose another; 0 takes any free one.",
        ) from error


class _Line:
    """One engine's connection, and the NCCL group beside it once there is one."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device
        self._pair: NcclPair | None = None

    def send(self, version: Version, answer: FetchResponse, snapshot: Snapshot | None) -> None:
        if snapshot is not None and answer.carrier == "ipc":
            with snapshot.lent() as memory:
                if memory is not None:
                    answer.memory = memory
                    self._connection.send(answer)
                    self._wait_until_done()
                    return
            answer.carrier = "stream"  # there was no row when it was published, or another version is there by now
        if answer.carrier == "nccl" and self._pair is None:
            answer.group = new_group_id().hex()
        self._connection.send(answer)
        if snapshot is None:
            return
        snapshot.wait()
        if answer.carrier == "stream":
            for what, bucket in _named(snapshot, version):
                self._connection.send_bytes(bucket.numpy().data, what)
            return
        if self._pair is None:
            self._pair = NcclPair(bytes.fromhex(answer.group), 0, self._device, self._connection.check)
        self._send_by(self._pair, snapshot, version)

    def _wait_until_done(self) -> None:
        """However long that takes: where the engine is gone instead, it no longer reads either."""
        if self._connection.wait_for_message():
            self._connection.receive(MemoryReleased, "that it is done")

    def _send_by(self, pair: NcclPair, snapshot: Snapshot, version: Version) -> None:
        staging = [torch.empty_like(snapshot.buckets[0], device=self._device) for _ in range(MAX_QUEUED_TRANSFERS)]
        under_way: deque[tuple[torch.cuda.Event, str]] = deque()
        for number, (what, bucket) in enumerate(_named(snapshot, version)):
            if len(under_way) == MAX_QUEUED_TRANSFERS:
                pair.wait(*under_way.popleft())
            row = staging[number % MAX_QUEUED_TRANSFERS][: len(bucket)]
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
