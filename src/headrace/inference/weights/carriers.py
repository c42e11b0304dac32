"""Carriers of weights from a trainer to an engine: which ones each end supports, and the best one for both."""

from __future__ import annotations

import os
import socket
from typing import Literal

import torch

from headrace.errors import Failure
from headrace.inference import cuda_driver
from headrace.inference.weights import nccl
from headrace.transport.weights_link import Carrier, LinkPeer

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
