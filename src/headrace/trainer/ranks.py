"""The ranks (processes) that train one model, and their collectives.

`torchrun` starts them and sets RANK, WORLD_SIZE and LOCAL_RANK; without it there is one rank. A process group always
exists, so that one rank and several run the same code; with one rank it costs nothing.
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
        if not dist.is_initialized():
            self._init_process_group()

    def _init_process_group(self) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes metrics and status."""
        return self.index == 0

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,))

    def sum(self, values: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, value: int) -> int:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank, the same on every rank."""
        return bool(self.most(int(condition)))

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor in place by sum; return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all(self, condition: bool) -> bool:
        """Return whether the condition holds on all ranks, the same on every rank."""
        return not self.any(not condition)

    def wait_for_all(self) -> None:
        self.most(0)

    def write_directory(self, final: Path, fill: Callable[[Path], None]) -> None:
        """Call `fill` on every rank to write its files into one directory, which is then published atomically."""

        def together(draft: Path) -> None:
            self.wait_for_all()  # the first rank has created it
            fill(draft)
            self.wait_for_all()

        if self.first:
            write_directory(final, together)
        else:
            together(draft_of(final))

    def new_cpu_group(self) -> dist.ProcessGroup:
        """Return another gloo group of the same ranks, for use by another thread."""
        return dist.new_group(backend="gloo")  # type: ignore[no-any-return]

    def _reduce(self, values: Sequence[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)  # on the CPU: not behind the GPU's queue
        dist.all_reduce(tensor, how)
        return [int(value) for value in tensor.tolist()]


def leave() -> None:
    """Destroy the process group at the end of the process, which NCCL requires."""
    if dist.is_initialized():
        dist.destroy_process_group()
