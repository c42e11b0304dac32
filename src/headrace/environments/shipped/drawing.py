"""Tasks drawn at random: the same for the same seed, all different, none in both training and evaluation."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.environments.arguments import check_choice, check_mistakes, check_whole
from headrace.environments.base import Environment

SPLITS = ("train", "eval")
EVAL_SHARE = 10
"""One task in so many belongs to evaluation, by a checksum of its content."""
PATIENCE = 200
"""Draws in a row without a new task before there seem to be no more."""

Draw = Callable[[random.Random], dict[str, Any]]
Part = Callable[[dict[str, Any]], Any]
"""A part of a task, as JSON values."""


class Drawn(Environment):
    """What environments of several turns take alike: which tasks, how many, and the mistakes in demonstrations."""

    def __init__(self, split: str, num_tasks: int, seed: int, demonstrate_mistakes: float) -> None:
        check_split(split)
        check_whole("num_tasks", num_tasks, 1)
        check_mistakes(demonstrate_mistakes)
        self.split = split
        self.num_tasks = num_tasks
        self.seed = seed
        self.demonstrate_mistakes = demonstrate_mistakes


def whole(task: dict[str, Any]) -> dict[str, Any]:
    return task


def draw_tasks(
    draw: Draw, split: str, num_tasks: int, seed: int, identity: Part = whole, split_by: Part | None = None
) -> Iterator[dict[str, Any]]:
    """Up to `num_tasks` different ones that `draw` makes: fewer where there are no more. None is drawn before its turn.

    Two tasks are the same if they have the same `identity`: it must be what the prompt depends on, and nothing else. Of
    what they have in common by `split_by` (unset: their identity) all are in one split.
    """
    check_split(split)
    check_whole("num_tasks", num_tasks, 1)
    return _drawn(draw, split, num_tasks, seed, identity, split_by or identity)


def _drawn(
    draw: Draw, split: str, num_tasks: int, seed: int, identity: Part, split_by: Part
) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{seed}-{split}")
    known: set[bytes] = set()
    in_vain = 0
    while len(known) < num_tasks and in_vain < PATIENCE:
        task = draw(rng)
        name = _encoded(identity(task))
        in_vain += 1
        if name not in known and (zlib.crc32(_encoded(split_by(task))) % EVAL_SHARE == 0) == (split == "eval"):
            in_vain = 0
            known.add(name)
            yield task


def _encoded(part: Any) -> bytes:
    return msgspec.json.encode(part, order="deterministic")


def check_split(split: Any) -> None:
    check_choice("split", split, SPLITS)
