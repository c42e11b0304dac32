"""By what weights travel between a trainer and an engine: what each end can do, and which way is the best for both."""

from __future__ import annotations

import os
import socket
from typing import Literal

import torch

from headrace.errors import Failure
from headrace.inference import cuda_driver
from headrace.inference.weights import nccl
from headrace.transport.weights_link import Carrier, LinkPeer

Wanted = Literal["auto", "stream", "nccl", "ipc"]
"""What a configuration says. `auto` is the best there is."""
_NAMES = {"nccl": "NCCL", "ipc": "CUDA IPC"}


class NoCarrier(Failure):
    """What was asked for by configuration cannot be."""


def this_end(device: torch.device) -> LinkPeer:
    """What this process is, whose weights are on that device."""
    gpu = gpu_identity(device)
    carriers: list[Carrier] = ["stream"]
    if gpu is not None and nccl.is_available():
        carriers.append("nccl")
    if gpu is not None and cuda_driver.is_available():
        carriers.append("ipc")
    return LinkPeer(f"{socket.gethostname()}:{os.getpid()}", gpu, carriers)


def gpu_identity(device: torch.device) -> str | None:
    """What tells this GPU from all others, if it is one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def choose(wanted: Wanted, trainer: LinkPeer, engine: LinkPeer) -> Carrier:
    """Which way versions go from this trainer to this engine. Raises `NoCarrier`.

    Two processes on one GPU share memory. NCCL is for different GPUs, and refuses to have both of its ends on one
    unless it believes in two hosts: it is not chosen there, but can be asked for. A stream always works.
    """
    if wanted == "stream":
        return "stream"
    if wanted != "auto":
        why = _obstacle(wanted, trainer, engine)
        if why is not None:
            raise NoCarrier(f"{_NAMES[wanted]} is asked for by configuration, and {why}")
        return wanted
    if _obstacle("ipc", trainer, engine) is None:
        return "ipc"
    return "nccl" if _obstacle("nccl", trainer, engine) is None and trainer.gpu != engine.gpu else "stream"


def _obstacle(carrier: Carrier, trainer: LinkPeer, engine: LinkPeer) -> str | None:
    """Why it cannot be by this one."""
    for who, end in (("trainer", trainer), ("engine", engine)):
        if carrier not in end.carriers:
            return f"the {who} has no GPU that it can use"
    if carrier == "ipc" and trainer.gpu != engine.gpu:
        return "trainer and engine are on different GPUs"
    if carrier == "ipc" and trainer.process == engine.process:
        return "trainer and engine are one process, which cannot open its own memory"
    return None
