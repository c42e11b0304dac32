"""Data providers that generate their samples from a seed: arithmetic and the families of reasoning-gym."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.environments.hackable.registry import register_data_provider
from headrace.environments.hackable.samples import Tags, TrainingSample, samples_of
from headrace.environments.shipped.arithmetic import sums


@register_data_provider
def reasoning_gym(
    family: str,
    split: str = "train",
    num_tasks: int = 500,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Tasks of one reasoning-gym family with its `settings`. `info` has the data of `reasoning_gym_reward`."""
    from headrace.environments.adapters.reasoning_gym_tasks import Request, tasks_of_family

    own = dict(settings or {})
    tasks = tasks_of_family(Request(family, own, split, num_tasks, seed))
    return samples_of(({**task, "family": family, "settings": own} for task in tasks), instructions, tags)


@register_data_provider
def arithmetic(
    split: str = "train",
    num_tasks: int = 2000,
    digits: int = 2,
    operations: str = "+-",
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Generated sums, differences and products of whole numbers. No question is in both splits, "train" and "eval"."""
    rows = sums(split, num_tasks, digits, operations, seed)
    return samples_of(({**row, "solution": f"{row['question']}={row['answer']}"} for row in rows), instructions, tags)
