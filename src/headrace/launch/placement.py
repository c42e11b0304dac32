"""Which GPUs the processes of a run get. Pure, but for the question which there are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config.base import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placement:
    """One entry of `inference` per server: the GPUs it sees. None are named on a machine without GPUs."""

    trainer_processes: int
    trainer: Sequence[str]
    inference: Sequence[Sequence[str]]


def place(
    gpus: Sequence[str], *, trainer_processes: int | None, inference_gpus: int | None, inference_servers: int | None
) -> Placement:
    """Share GPUs between trainer and servers; what is unset is chosen so that each gets half.

    A single GPU is shared by all. On a machine without GPUs the numbers of processes alone count.
    """
    if not gpus:
        if inference_gpus:
            raise ConfigError(f"launch.inference_gpus = {inference_gpus}, but this machine has no GPU that is visible")
        return Placement(trainer_processes or 1, (), [()] * (inference_servers or 1))
    if len(gpus) == 1:
        if (trainer_processes or 1) > 1 or (inference_gpus or 1) > 1:
            raise ConfigError("launch: one GPU is visible, which trainer and inference share: ask for one of each")
        return Placement(1, gpus, [gpus] * (inference_servers or 1))
    sampling = inference_gpus or (len(gpus) - trainer_processes if trainer_processes else len(gpus) // 2)
    training = trainer_processes or len(gpus) - sampling
    if sampling < 1 or training < 1 or sampling + training > len(gpus):
        raise ConfigError(
            f"launch: {training} trainer_processes and {sampling} inference_gpus need a GPU each, but {len(gpus)} are "
            "visible: lower one of them"
        )
    if inference_servers not in (None, sampling):
        raise ConfigError(
            f"launch: {sampling} inference_gpus and {inference_servers} inference_servers: each samples on one "
            "GPU; leave inference_servers out"
        )
    return Placement(training, gpus[sampling : sampling + training], [[gpu] for gpu in gpus[:sampling]])


def place_trainer(gpus: Sequence[str], trainer_processes: int | None) -> tuple[int, Sequence[str]]:
    """The ranks of a trainer that has the machine for itself, and their GPUs; unset: one on each."""
    if gpus and trainer_processes is not None and trainer_processes > len(gpus):
        raise ConfigError(
            f"launch.trainer_processes = {trainer_processes}: each needs a GPU, but {len(gpus)} are visible"
        )
    ranks = trainer_processes or max(1, len(gpus))
    return ranks, gpus[:ranks]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names under which CUDA knows them."""
    if (chosen := os.environ.get(VISIBLE)) is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.split() if found.returncode == 0 else []


def seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Environment in which a process sees these GPUs alone; nothing changes on a machine that has none."""
    return {VISIBLE: ",".join(gpus)} if gpus else {}
