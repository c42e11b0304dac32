"""Engines that are started on this machine: how many at once, and what each gets of it.

Models take turns on teams of engines. A team is one engine where models wait for one, and several that share the
episodes of a model where there are more engines than models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.config.base import Tree
from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.launch.local import threads, usable_cores
from headrace.launch.placement import seeing
from headrace.machine import free_memory, visible_gpus
from headrace.runfile.reading import parse_overrides, put, validate

CORES_PER_ENGINE = 2
MEMORY_PER_ENGINE = 2 << 30
"""Bytes that an engine of a small model takes without a GPU."""

Team = Sequence[Mapping[str, str]]
"""Engines that serve one model at a time: for each, the variables of its process."""


class Machine(NamedTuple):
    gpus: Sequence[str]
    cores: int
    memory: int
    """Bytes that are free."""


def this_machine() -> Machine:
    return Machine(visible_gpus(), usable_cores(), free_memory())


def gpus_per_engine(serve_options: Sequence[str]) -> int:
    """Return how many GPUs a server with these options of `headrace serve` takes; refuses options that it has not."""
    tree: Tree = {}
    for key, value in parse_overrides(serve_options):
        put(tree, key, value)
    config, _ = validate(InferenceConfig, tree, "--serve-args")
    return config.gpus_per_server


def teams_of(machine: Machine, wanted: int | None, gpus_each: int, models: int) -> list[Team]:
    """Return the teams on which `models` take turns, of `wanted` engines in all.

    Unset: one on each GPU (or on as many as an engine takes); without GPUs, as many as there are models, within two
    cores and 2 GiB of free memory for each.
    """
    sets = [machine.gpus[first : first + gpus_each] for first in range(0, len(machine.gpus), gpus_each)]
    sets = [gpus for gpus in sets if len(gpus) == gpus_each]
    if machine.gpus and (wanted or 1) > len(sets):
        raise BadInput(
            f"an engine takes {gpus_each} of the {len(machine.gpus)} GPUs that are visible",
            key="--engines",
            value=wanted,
            fix=f"Ask for at most {len(sets)}." if sets else "Lower the parallel sizes in --serve-args.",
        )
    room = min(models, machine.cores // CORES_PER_ENGINE, machine.memory // MEMORY_PER_ENGINE)
    count = max(1, wanted or len(sets) or room)
    share = threads(max(1, machine.cores // count)) if count > 1 else {}
    engines = [{**share, **(seeing(sets[number]) if sets else {})} for number in range(count)]
    each = max(1, count // max(1, models))
    return [engines[first : first + each] for first in range(0, count - each + 1, each)]
