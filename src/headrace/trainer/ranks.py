"""The ranks (processes) that train one model, their collectives, and their start on one or several hosts.

`torchrun` or `run_ranks` starts them and sets RANK, WORLD_SIZE and LOCAL_RANK; without it there is one rank. A process
group always exists, so that one rank and several run the same code; with one rank it costs nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from headrace.machine import interface_address
from headrace.rollout.schema import DamagedFile
from headrace.transport.digests import write_digests
from headrace.transport.files import draft_of, write_directory

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Ranks:
    """This process and its process group."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.index = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        if device is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.device = device
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes metrics and status."""
        return self.index == 0

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,))

    def sum(self, values: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks, the same on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """Return the largest value over all ranks, the same on every rank."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank, the same on every rank."""
        return bool(self.max(int(condition)))

    def all_reduce(self, values: Tensor) -> Tensor:
        """All-reduce a tensor in place by sum; return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all(self, condition: bool) -> bool:
        """Return whether the condition holds on all ranks, the same on every rank."""
        return not self.any(not condition)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        values: list[T | None] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        else:
            values = [value]
        return values  # type: ignore[return-value]

    def agree_on_damage(self, read: Callable[[], T]) -> T:
        """Return the result of `read` on this rank; raise on all ranks if one of them has a damaged file."""
        result: T | None = None
        damage: DamagedFile | None = None
        try:
            result = read()
        except DamagedFile as error:
            damage = error
        if self.any(damage is not None):
            raise next(each for each in self.gather(damage) if each is not None)
        return cast(T, result)

    def barrier(self) -> None:
        self.max(0)

    def write_directory(self, final: Path, fill: Callable[[Path], None]) -> None:
        """Call `fill` on every rank to write its files into one directory, which is then published atomically."""

        def write(draft: Path) -> None:
            self.barrier()  # the first rank has created it
            fill(draft)
            self.barrier()
            if self.is_first:
                write_digests(draft)

        if self.is_first:
            write_directory(final, write)
        else:
            write(draft_of(final))

    def _reduce(self, values: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)  # on the CPU: not behind the GPU's queue
        dist.all_reduce(tensor, how)
        return [int(value) for value in tensor.tolist()]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; another tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def destroy_process_group() -> None:
    """Destroy the process group at the end of the process, which NCCL requires."""
    if dist.is_initialized():
        dist.destroy_process_group()


TORCH_KILL_DELAY_S = 10
"""A rank killed within this time after the first failure was not killed by torch."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankExit(NamedTuple):
    """Exit code of a rank, negative for a signal, and its time in seconds."""

    code: int
    time: int


@dataclass(frozen=True)
class Node:
    """This host's place in a trainer on several hosts: its index, their number, and `HOST:PORT` of the first one."""

    index: int
    count: int
    rendezvous: str


def run_ranks(ranks: int, arguments: Sequence[str], node: Node | None = None) -> int:
    """Run `headrace ARGUMENTS` on `ranks` ranks of this host until the last has ended; return the exit code.

    Like the `torchrun` command, except for the exit code: the launcher of a run restarts a process that was killed by a
    signal, but not one that failed with an error, so this process ends in the same way as its ranks. Hosts have fixed
    indices, so that each rank reads the same data as on one host.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks log their errors
    if node is not None:
        choose_network_interface(node.rendezvous)
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as scratch:
        config = LaunchConfig(
            min_nodes=1 if node is None else node.count,
            max_nodes=1 if node is None else node.count,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            run_id=uuid.uuid4().hex if node is None else node.rendezvous,
            rdzv_backend="c10d" if node is None else "static",
            rdzv_endpoint="localhost:0" if node is None else node.rendezvous,
            rdzv_configs={} if node is None else {"rank": node.index},
            local_addr="localhost" if node is None else None,
            max_restarts=0,  # the launcher of the run restarts
        )
        try:
            elastic_launch(config, sys.executable)("-m", "headrace", *arguments)
        except ChildFailedError as error:
            code = joint_exit_code([RankExit(f.exitcode, f.timestamp) for f in error.failures.values()])
        except SignalException as error:
            return 128 + int(error.sigval)
        else:
            return 0
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def choose_network_interface(rendezvous: str) -> None:
    """Set the network interface of collectives to that of the route to an IPv4 address, unless one is configured.

    Gloo would use the address of this host's name, which is often a loopback address.
    """
    host, port = rendezvous.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without an IPv4 address
            if interface_address(name) == own:
                for variable in INTERFACE_VARIABLES:
                    os.environ.setdefault(variable, name)
                return


def joint_exit_code(exits: Sequence[RankExit]) -> int:
    """Return one exit code for all ranks; negative if the cause was a signal that killed one of them.

    One of several failures is the cause: a rank whose peer was killed fails in a collective, and torch kills the
    remaining ranks half a minute later.
    """
    first = min(exit_.time for exit_ in exits)
    early = [e.code for e in exits if e.time - first < TORCH_KILL_DELAY_S]
    killed = [code for code in early if code < 0 and -code not in TERMINATION_SIGNALS]
    explained = [exit_.code for exit_ in exits if 0 < exit_.code < 128]
    if killed:
        return killed[0]
    return max(explained or [exit_.code if exit_.code > 0 else 128 - exit_.code for exit_ in exits])
