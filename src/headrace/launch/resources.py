"""The resources of this machine for a run: measured, planned, described and refused before anything starts."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.errors import BadInput
from headrace.inference.model_shape import ModelShape
from headrace.launch.hosts.local import this_machine
from headrace.launch.out_of_memory import MEMORY_ADVICE
from headrace.launch.placement import place
from headrace.launch.processes import needs_of, sharing_of
from headrace.launch.resource_changes import changes_of, find_refusal
from headrace.launch.resource_plan import AnyRun, Machine, gib, plan_resources
from headrace.machine import HostMemory, file_system, gpu_memory

MIN_SHOWN_SHARE = 0.01
"""Share of a resource that a run must need for a line about it."""
MIN_SAVED_SHARE = 0.05
"""Share of the needed host memory that a change must save to be worth mentioning."""


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run on this machine."""

    lines: tuple[str, ...]
    """The plan for the user."""
    refusal: BadInput | None
    """Why the run cannot fit."""
    max_running: int | None
    """Requests that each server decodes together; None: left to the server."""
    memory_advice: str
    """What would need less host memory."""


def plan_here(config: AnyRun, shape: ModelShape, machine: Machine | None = None) -> PlannedRun:
    """Plan a run on this machine. Raises `ConfigError` if its GPUs are not enough for its processes."""
    placement = place([this_machine()], needs_of(config))
    sharing = sharing_of(config, placement)
    machine = machine or measure(config.output_dir)
    plan = partial(plan_resources, shape=shape, machine=machine, placement=placement, sharing=sharing)
    planned = plan(config)
    lines = [str(budget) for budget in planned.budgets if budget.needed >= MIN_SHOWN_SHARE * budget.available]
    if placement.trains_on_gpus and machine.gpu_memory is None:
        lines.append("GPU memory is not planned: nvidia-smi does not report its size")
    host = next(budget for budget in planned.budgets if budget.resource == "host memory")
    savings = []
    for change in changes_of(config):
        changed = next(budget for budget in plan(change.apply(config)).budgets if budget.resource == "host memory")
        if host.needed - changed.needed > MIN_SAVED_SHARE * host.needed:
            savings.append(f"{change.text} needs {gib(host.needed - changed.needed)} GiB less")
    advice = f"Planned: {host}. {'; '.join(savings) or MEMORY_ADVICE}"
    return PlannedRun(tuple(lines), find_refusal(config, plan), planned.max_running, advice)


def measure(output_dir: Path | None) -> Machine:
    """Return the sizes of this machine; `output_dir` is on the disk that counts."""
    memory = HostMemory()
    free_disk, is_memory = None, False
    if output_dir is not None:
        path = output_dir.absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free_disk = shutil.disk_usage(existing).free + occupied_bytes(path)
        is_memory = file_system(existing) == "tmpfs"
    return Machine(gpu_memory(), memory.total(), memory.swap(), memory.free(), free_disk, is_memory)


def occupied_bytes(run: Path) -> int:
    """Return the bytes of a run's checkpoints and weights: a run that is resumed or replaced has them already."""
    files = {}
    for name in ("checkpoints", "weights", "model"):
        for folder, _, names in os.walk(run / name):
            for entry in names:
                found = os.lstat(os.path.join(folder, entry))
                files[found.st_ino] = found.st_size  # a permanent checkpoint is a link to another one
    return sum(files.values())
