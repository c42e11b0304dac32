"""The processes that train one model together, and the few things that they say to each other.

`torchrun` starts them and tells each its place through the environment; without it there is one. A process group always
exists, so that one rank and many run the same code; on one it costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.transport.files import draft_of, write_directory

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in a collective before it gives up."""


class Ranks:
    """This process among its peers."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.index = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = device or _device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            _join(self.index, self.size, self.device)

    @property
    def first(self) -> bool:
        """Whether this one speaks for all: it writes records and status."""
        return self.index == 0

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,))

    def sum(self, values: Sequence[int]) -> list[int]:
        """Of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, value: int) -> int:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def any(self, condition: bool) -> bool:
        """Whether it holds on any rank; every rank gets the same answer."""
        return bool(self.most(int(condition)))

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all(self, condition: bool) -> bool:
        """Whether it holds on every rank; every rank gets the same answer."""
        return not self.any(not condition)

    def wait_for_all(self) -> None:
        self.most(0)

    def write_directory(self, final: Path, fill: Callable[[Path], None]) -> None:
        """Let every rank write its part into one directory, which is then there whole or not at all."""

        def together(draft: Path) -> None:
            self.wait_for_all()  # the first has made it
            fill(draft)
            self.wait_for_all()

        if self.first:
            write_directory(final, together)
        else:
            together(draft_of(final))

    def group_beside(self) -> dist.ProcessGroup:
        """Another group of the same ranks, on their CPUs, for a thread that talks while this one does."""
        return dist.new_group(backend="gloo")  # type: ignore[no-any-return]

    def _reduce(self, values: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)  # on the CPU: a GPU would first finish its queue
        dist.all_reduce(tensor, how)
        return [int(value) for value in tensor.tolist()]


def leave() -> None:
    """Part from the other ranks at the end of the process: NCCL complains of those who do not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _join(index: int, size: int, device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
