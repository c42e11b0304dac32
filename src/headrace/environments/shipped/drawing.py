"""Randomly drawn tasks: deterministic under a seed, all different, none in both splits."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.environments.arguments import check_choice, check_mistakes, check_whole
from headrace.environments.base import Environment

SPLITS = ("train", "eval")
EVAL_SHARE = 10
"""One task in this many is in `eval`, by a checksum of its content."""
MAX_FUTILE_DRAWS = 200
"""Draws in a row without a new task after which there are assumed to be no more."""
FIRST_EVAL_SEED = 1 << 20
"""Seeds of evaluation begin here, and those of training end."""

Draw = Callable[[random.Random], dict[str, Any]]
Part = Callable[[dict[str, Any]], Any]
"""Returns a part of a task, as JSON values."""


@dataclass(eq=False)
class Drawn(Environment):
    """Base of environments of several turns with randomly drawn tasks; its fields are the `args` of a run file."""

    split: str = "train"
    num_tasks: int = 1000
    seed: int = 0
    demonstrate_mistakes: float = 0.0

    def __post_init__(self) -> None:
        check_split(self.split)
        check_whole("num_tasks", self.num_tasks, 1)
        check_mistakes(self.demonstrate_mistakes)


def whole(task: dict[str, Any]) -> dict[str, Any]:
    return task


def draw_tasks(
    draw: Draw, split: str, num_tasks: int, seed: int, identity: Part = whole, split_by: Part | None = None
) -> Iterator[dict[str, Any]]:
    """Yield up to `num_tasks` different tasks that `draw` makes, lazily; fewer where there are no more.

    Two tasks are the same if they have the same `identity`: it must be all that the prompt depends on, and nothing
    else. Tasks with the same `split_by` (default: the identity) are in the same split.
    """
    check_split(split)
    check_whole("num_tasks", num_tasks, 1)

    def drawn() -> Iterator[dict[str, Any]]:
        rng = random.Random(f"{seed}-{split}")
        identities: set[bytes] = set()
        futile = 0
        while len(identities) < num_tasks and futile < MAX_FUTILE_DRAWS:
            task = draw(rng)
            own = msgspec.json.encode(identity(task), order="deterministic")
            group = msgspec.json.encode((split_by or identity)(task), order="deterministic")
            futile += 1
            if own not in identities and (zlib.crc32(group) % EVAL_SHARE == 0) == (split == "eval"):
                futile = 0
                identities.add(own)
                yield task

    return drawn()


def seeds_of(split: str, num_tasks: int, seed: int) -> range:
    """Return the seeds of the tasks of a game; those of `train` and of `eval` are disjoint."""
    check_split(split)
    check_whole("num_tasks", num_tasks, 1, FIRST_EVAL_SEED)
    check_whole("seed", seed, 0)
    first = seed + (FIRST_EVAL_SEED if split == "eval" else 0)
    return range(first, first + num_tasks)


def check_split(split: Any) -> None:
    check_choice("split", split, SPLITS)
