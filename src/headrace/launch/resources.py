"""The resources of this machine for a run: measured, planned, described and refused before anything starts.

A refusal names the changes of the run file with which the run fits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.trainer import AdamWConfig, LoraConfig, TrainingConfig
from headrace.errors import BadInput
from headrace.inference.model_shape import ModelShape
from headrace.launch.hosts.local import this_machine
from headrace.launch.out_of_memory import MEMORY_ADVICE
from headrace.launch.placement import place
from headrace.launch.processes import needs_of, sharing_of
from headrace.launch.resource_plan import Machine, ResourcePlan, ResourcePlanner, gib, trainer_of
from headrace.machine import HostMemory, file_system, gpu_memory
from headrace.runfile.run import AnyRun, RunConfig

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

    def plan(run: AnyRun) -> ResourcePlan:
        return ResourcePlanner(run, shape, machine, placement, sharing).plan()

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
                stat = os.lstat(os.path.join(folder, entry))
                files[stat.st_ino] = stat.st_size  # a permanent checkpoint is a link to another one
    return sum(files.values())


MAX_CHANGES = 3
"""Changes of the run file that are combined to make it fit."""


class Change(NamedTuple):
    """A change of a run file that may make it fit."""

    key: str
    text: str
    apply: Callable[[AnyRun], AnyRun]


def find_refusal(config: AnyRun, plan_of: Callable[[AnyRun], ResourcePlan]) -> BadInput | None:
    """Return why a run cannot fit, with the changes for which its plan fits; None if it may fit."""
    plan = plan_of(config)
    facts = [
        f"{budget.resource}: at least {gib(budget.certain)} GiB are needed, and {gib(budget.available)} exist "
        f"({', '.join(f'{part.name} {gib(part.size)}' for part in budget.parts if part.is_certain and part.size)})"
        for budget in plan.budgets
        if budget.cannot_fit
    ]
    # An engine's refusal repeats what the budget of its GPU shows.
    facts = facts or [problem.fact for problem in plan.problems]
    if not facts:
        return None
    solutions = find_solutions(config, lambda changed: plan_of(changed).fits)
    if not solutions:
        fix = "No setting of the run file makes it fit: take a smaller model, or a larger machine."
        return BadInput("; ".join(facts), key="model.name", value=config.model.name, fix=fix)
    texts = [" and ".join(change.text for change in solution) for solution in solutions]
    key = solutions[0][0].key
    value = reduce(getattr, key.split("."), config)  # None for a section that is not set
    return BadInput("; ".join(facts), key=key, value=value, fix=f"It fits with {', or '.join(texts)}.")


def find_solutions(config: AnyRun, fits: Callable[[AnyRun], bool]) -> list[tuple[Change, ...]]:
    """Return the smallest combinations of changes that make a run fit."""
    changes = list(changes_of(config))
    for count in range(1, MAX_CHANGES + 1):
        solutions = []
        for solution in combinations(changes, count):
            changed = config
            for change in solution:
                changed = change.apply(changed)
            if fits(changed):
                solutions.append(solution)
        if solutions:
            return solutions
    return []


def changes_of(config: AnyRun) -> Iterator[Change]:
    """Yield the changes that need less of something, those that change the training least first."""
    trainer = trainer_of(config)
    prefix = "trainer." if isinstance(config, RunConfig) else ""

    def change(key: str, text: str, update: Callable[[TrainingConfig], dict[str, Any]]) -> Change:
        def apply(run: AnyRun) -> AnyRun:
            changed = update(trainer_of(run))
            if isinstance(run, RunConfig):
                changed = {"trainer": run.trainer.model_copy(update=changed)}
            return run.model_copy(update=changed)

        return Change(f"{prefix}{key}", text.format(prefix), apply)

    def within(section: str, **values: Any) -> Callable[[TrainingConfig], dict[str, Any]]:
        return lambda run: {section: getattr(run, section).model_copy(update=values)}

    if trainer.ckpt.keep_last > 1:
        yield change("ckpt.keep_last", "{0}ckpt.keep_last = 1", within("ckpt", keep_last=1))
    if config.max_steps is not None and trainer.ckpt.interval < config.max_steps:
        text = f"{{0}}ckpt.interval = {config.max_steps} (one checkpoint)"
        yield change("ckpt.interval", text, within("ckpt", interval=config.max_steps, permanent_interval=None))
    if isinstance(config, RunConfig):
        for transport in ("link", "files"):
            if config.trainer.weights.transport != transport:
                text = f'{{0}}weights.transport = "{transport}"'
                yield change("weights.transport", text, within("weights", transport=transport))
    if trainer.lora is None and isinstance(trainer.optim, AdamWConfig) and trainer.optim.state_bits > 8:
        yield change("optim.state_bits", "{0}optim.state_bits = 8", within("optim", state_bits=8))
    if trainer.lora is None and not trainer.optim.offload_state:
        yield change("optim.offload_state", "{0}optim.offload_state = true", within("optim", offload_state=True))
    if trainer.lora is not None and trainer.lora.save_merged:
        yield change("lora.save_merged", "{0}lora.save_merged = false", within("lora", save_merged=False))
    if trainer.lora is None:
        adapter = LoraConfig()
        yield change("lora", "an adapter ([{0}lora])", lambda run: {"lora": adapter})
