"""Tasks drawn at random: the same for the same seed, all different, none in both training and evaluation."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

SPLITS = ("train", "eval")
EVAL_SHARE = 10
"""One task in so many belongs to evaluation, by a checksum of its content."""
PATIENCE = 200
"""Draws in a row without a new task before there seem to be no more."""


def draw_tasks(
    draw: Callable[[random.Random], dict[str, Any]], split: str, num_tasks: int, seed: int
) -> list[dict[str, Any]]:
    """Up to `num_tasks` different ones that `draw` makes: fewer where there are no more."""
    check_split(split)
    if num_tasks < 1:
        raise TypeError(f"num_tasks must be positive, not {num_tasks}")
    rng = random.Random(f"{seed}-{split}")
    tasks: dict[bytes, dict[str, Any]] = {}
    in_vain = 0
    while len(tasks) < num_tasks and in_vain < PATIENCE:
        task = draw(rng)
        content = msgspec.json.encode(task, order="deterministic")
        wanted = (zlib.crc32(content) % EVAL_SHARE == 0) == (split == "eval") and content not in tasks
        in_vain = 0 if wanted else in_vain + 1
        if wanted:
            tasks[content] = task
    return list(tasks.values())


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise TypeError(f"split must be 'train' or 'eval', not {split!r}")
