"""The tasks of a game that is made of a seed: so many seeds, those of training and of evaluation apart."""

from __future__ import annotations

from headrace.environments.arguments import check_choice, check_whole
from headrace.environments.shipped.drawing import SPLITS

HELD_OUT = 1 << 20
"""Seeds of evaluation begin here, and those of training end."""


def seeds_of(split: str, num_tasks: int, seed: int) -> range:
    check_choice("split", split, SPLITS)
    check_whole("num_tasks", num_tasks, 1, HELD_OUT)
    check_whole("seed", seed, 0)
    first = seed + (HELD_OUT if split == "eval" else 0)
    return range(first, first + num_tasks)
