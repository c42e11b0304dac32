"""Assign GPUs to the processes of a run. Pure functions: `headrace.machine` lists the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.config.base import ConfigError
from headrace.machine import VISIBLE_GPUS_VAR

PARALLEL = "inference.vllm tensor_parallel_size * data_parallel_size"
"""The keys that make a server take several GPUs."""

Sharing = Literal["alternate", "overlap"]
"""How trainer and servers use one GPU: in turns, or at the same time."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of the trainer and of each server in `inference`; empty on a machine without GPUs."""

    trainer_processes: int
    trainer: Sequence[str]
    inference: Sequence[Sequence[str]]

    @property
    def shares_gpu(self) -> bool:
        """Whether a server samples on a GPU of the trainer."""
        return any(gpu in self.trainer for gpus in self.inference for gpu in gpus)

    def sharing(self, wanted: Sharing | None, *, trainer_waits: bool) -> Sharing | None:
        """Return how one rank and the servers share their device, or None. Alternation needs a trainer that waits."""
        if self.shares_gpu:
            return wanted or ("alternate" if trainer_waits else "overlap")
        on_cpus = not self.trainer and self.trainer_processes == 1
        return wanted if on_cpus and wanted == "alternate" else None


def place(
    gpus: Sequence[str],
    *,
    trainer_processes: int | None,
    inference_gpus: int | None,
    inference_servers: int | None,
    gpus_per_server: int = 1,
) -> Placement:
    """Divide GPUs between trainer and servers; unset numbers are chosen so that each gets half.

    All processes share a single GPU. On a machine without GPUs only the numbers of processes matter.
    """
    each = gpus_per_server
    if not gpus:
        if inference_gpus:
            fact = "no GPU is visible on this machine"
            raise ConfigError(fact, key="launch.inference_gpus", value=inference_gpus, fix="Leave it out.")
        return Placement(trainer_processes or 1, (), [()] * (inference_servers or 1))
    if len(gpus) == 1:
        if each > 1:
            raise ConfigError(f"a server takes {each} GPUs, but one is visible", key=PARALLEL, fix="Lower it to 1.")
        if (trainer_processes or 1) > 1 or (inference_gpus or 1) > 1:
            fix = "Set trainer_processes and inference_gpus to 1, or leave them out."
            raise ConfigError("one GPU is visible, which trainer and inference share", key="launch", fix=fix)
        return Placement(1, gpus, [gpus] * (inference_servers or 1))
    if inference_gpus:
        sampling = inference_gpus
    elif trainer_processes is not None:  # what the trainer leaves, in whole servers
        sampling = (len(gpus) - trainer_processes) // each * each
    else:
        sampling = max(1, len(gpus) // 2 // each) * each
    training = trainer_processes or len(gpus) - sampling
    if sampling < 1 or training < 1 or sampling + training > len(gpus):
        detail = f" ({PARALLEL}: a server takes {each})" if each > 1 else ""
        raise ConfigError(
            f"{training} trainer_processes and {sampling} inference_gpus need a GPU each, but {len(gpus)} are visible",
            key="launch",
            fix=f"Lower one of them{detail}.",
        )
    if sampling % each:
        fact = f"a server takes {each} GPUs ({PARALLEL})"
        raise ConfigError(fact, key="launch.inference_gpus", value=sampling, fix=f"Set it to a multiple of {each}.")
    if inference_servers not in (None, sampling // each):
        fact = f"{sampling} inference_gpus make {sampling // each} servers of {each} GPUs each"
        raise ConfigError(fact, key="launch.inference_servers", value=inference_servers, fix="Leave it out.")
    servers = [gpus[first : first + each] for first in range(0, sampling, each)]
    return Placement(training, gpus[sampling : sampling + training], servers)


def place_trainer(gpus: Sequence[str], trainer_processes: int | None) -> tuple[int, Sequence[str]]:
    """Return the number of ranks of a trainer without servers, and their GPUs; default: one rank per GPU."""
    if gpus and trainer_processes is not None and trainer_processes > len(gpus):
        fact = f"each needs a GPU, but {len(gpus)} are visible"
        fix = f"Lower it to {len(gpus)}, or leave it out."
        raise ConfigError(fact, key="launch.trainer_processes", value=trainer_processes, fix=fix)
    ranks = trainer_processes or max(1, len(gpus))
    return ranks, gpus[:ranks]


def gpu_env(gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables that make only these GPUs visible; none on a machine without GPUs."""
    return {VISIBLE_GPUS_VAR: ",".join(gpus)} if gpus else {}
