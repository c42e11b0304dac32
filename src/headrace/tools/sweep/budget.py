"""What each of several runs at once gets of the machine: GPUs and threads of its own. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from headrace.config.base import ConfigError
from headrace.config.sft import SftConfig
from headrace.runfile.run import RunConfig

MEMORY = 3 << 30
"""Bytes that a run of a small model takes without a GPU, in three processes."""


class Machine(NamedTuple):
    gpus: Sequence[str]
    pairs: int
    """Of cores: a run computes in two processes, the trainer and the server."""
    memory: int
    """Bytes that are free."""


class Share(NamedTuple):
    """Of one run."""

    gpus: Sequence[str]
    threads: int | None
    """Of each process that computes; None: as a run alone would have."""


def shares(machine: Machine, parallel: int | Literal["auto"], gpus_per_run: int, runs: int) -> list[Share]:
    """One for each run at a time. More runs than the GPUs take, if somebody asks for them, share GPUs."""
    gpus, each = machine.gpus, gpus_per_run
    if not gpus:
        room = min(machine.pairs, machine.memory // MEMORY)
        count = max(1, min(runs, room if parallel == "auto" else parallel))
        return [Share((), max(1, machine.pairs // count) if count > 1 else None)] * count
    if each > len(gpus):
        raise ConfigError(f"{len(gpus)} GPUs are visible", key="gpus_per_run", value=each)
    sets = [gpus[first : first + each] for first in range(0, len(gpus) - each + 1, each)]
    count = max(1, min(runs, len(sets) if parallel == "auto" else parallel))
    threads = max(1, machine.pairs // count) if count > 1 else None
    return [Share(sets[number % len(sets)], threads) for number in range(count)]


def of_its_own(config: RunConfig | SftConfig, share: Share) -> dict[str, Any]:
    """Overrides that keep a run from taking what others need: cores, and ports that can be had once alone."""
    found: dict[str, Any] = {}
    if share.threads is None:
        return found
    if config.launch.threads is None:
        found["launch.threads"] = share.threads
    if config.inference.port:
        found["inference.port"] = 0
    if isinstance(config, RunConfig) and config.trainer.weights.port:
        found["trainer.weights.port"] = 0
    return found


def check_engines(config: RunConfig | SftConfig, count: int) -> None:
    """Engines that run elsewhere have the weights of one policy at a time."""
    if count > 1 and isinstance(config, RunConfig) and config.orchestrator.client.base_url:
        raise ConfigError(
            "these engines serve one run at a time",
            key="orchestrator.client.base_url",
            fix="Set parallel to 1, or leave base_url out and let every run start its own.",
        )
