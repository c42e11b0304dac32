"""Which GPUs the processes of a run get. Pure: `headrace.machine` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.config.base import ConfigError
from headrace.machine import VISIBLE_GPUS_VAR

PARALLEL = "inference.vllm tensor_parallel_size * data_parallel_size"
"""What makes a server take several GPUs."""

Sharing = Literal["alternate", "overlap"]
"""In turns, or both at once."""


@dataclass(frozen=True)
class Placement:
    """One entry of `inference` per server: the GPUs it sees. None are named on a machine without GPUs."""

    trainer_processes: int
    trainer: Sequence[str]
    inference: Sequence[Sequence[str]]

    @property
    def shares_gpu(self) -> bool:
        """Whether a server samples on a GPU that trains, too."""
        return any(gpu in self.trainer for gpus in self.inference for gpu in gpus)

    def sharing(self, wanted: Sharing | None, *, trainer_waits: bool) -> Sharing | None:
        """How one rank and the servers share their device, if they do. A trainer that never waits leaves no turns."""
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
    """Share GPUs between trainer and servers; what is unset is chosen so that each gets half.

    A single GPU is shared by all. On a machine without GPUs the numbers of processes alone count.
    """
    each = gpus_per_server
    if not gpus:
        if inference_gpus:
            raise ConfigError(
                "no GPU is visible on this machine",
                key="launch.inference_gpus",
                value=inference_gpus,
                fix="Leave it out.",
            )
        return Placement(trainer_processes or 1, (), [()] * (inference_servers or 1))
    if len(gpus) == 1:
        if each > 1:
            raise ConfigError(f"a server takes {each} GPUs, but one is visible", key=PARALLEL, fix="Lower it to 1.")
        if (trainer_processes or 1) > 1 or (inference_gpus or 1) > 1:
            raise ConfigError(
                "one GPU is visible, which trainer and inference share",
                key="launch",
                fix="Set trainer_processes and inference_gpus to 1, or leave them out.",
            )
        return Placement(1, gpus, [gpus] * (inference_servers or 1))
    sampling = inference_gpus or _share(len(gpus), trainer_processes, each)
    training = trainer_processes or len(gpus) - sampling
    if sampling < 1 or training < 1 or sampling + training > len(gpus):
        why = f" ({PARALLEL}: a server takes {each})" if each > 1 else ""
        raise ConfigError(
            f"{training} trainer_processes and {sampling} inference_gpus need a GPU each, but {len(gpus)} are visible",
            key="launch",
            fix=f"Lower one of them{why}.",
        )
    if sampling % each:
        raise ConfigError(
            f"a server takes {each} GPUs ({PARALLEL})",
            key="launch.inference_gpus",
            value=sampling,
            fix=f"Set it to a multiple of {each}.",
        )
    if inference_servers not in (None, sampling // each):
        raise ConfigError(
            f"{sampling} inference_gpus have {sampling // each} servers: each samples on {each} of them",
            key="launch.inference_servers",
            value=inference_servers,
            fix="Leave it out.",
        )
    servers = [gpus[first : first + each] for first in range(0, sampling, each)]
    return Placement(training, gpus[sampling : sampling + training], servers)


def _share(gpus: int, trainer_processes: int | None, each: int) -> int:
    """GPUs that sample where nobody said how many: what the trainer leaves, else half, in whole servers."""
    if trainer_processes is not None:
        return (gpus - trainer_processes) // each * each
    return max(1, gpus // 2 // each) * each


def place_trainer(gpus: Sequence[str], trainer_processes: int | None) -> tuple[int, Sequence[str]]:
    """The ranks of a trainer that has the machine for itself, and their GPUs; unset: one on each."""
    if gpus and trainer_processes is not None and trainer_processes > len(gpus):
        raise ConfigError(
            f"each needs a GPU, but {len(gpus)} are visible",
            key="launch.trainer_processes",
            value=trainer_processes,
            fix=f"Lower it to {len(gpus)}, or leave it out.",
        )
    ranks = trainer_processes or max(1, len(gpus))
    return ranks, gpus[:ranks]


def seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Environment in which a process sees these GPUs alone; nothing changes on a machine that has none."""
    return {VISIBLE_GPUS_VAR: ",".join(gpus)} if gpus else {}
