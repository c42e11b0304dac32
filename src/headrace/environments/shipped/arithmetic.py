"""Sums, differences and products of whole numbers; the answer must be the number and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from headrace.environments.arguments import check_flag, check_letters, check_whole
from headrace.environments.rewards.text_rewards import Exact
from headrace.environments.shipped.drawing import draw_tasks
from headrace.environments.single_turn import SingleTurn

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Arithmetic(SingleTurn):
    """Two numbers of up to `digits` digits and one of `operations`; a `terse` prompt is "12+7="."""

    def __init__(
        self,
        split: str = "train",
        num_tasks: int = 2000,
        digits: int = 2,
        operations: str = "+-",
        terse: bool = False,
        seed: int = 0,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        check_flag("terse", terse)
        super().__init__(
            sums(split, num_tasks, digits, operations, seed),
            lambda row: f"{row['question']}=" if terse else f"What is {row['question']}? Answer with the number alone.",
            {"correct": Exact()},
            demonstrate_mistakes=demonstrate_mistakes,
        )


def sums(
    split: str = "train", num_tasks: int = 2000, digits: int = 2, operations: str = "+-", seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield questions such as "12+7" with their answers."""
    check_whole("digits", digits, 1, 100)
    check_letters("operations", operations, OPERATIONS)

    def draw(rng: random.Random) -> dict[str, Any]:
        left, right = (rng.randrange(10 ** rng.randint(1, digits)) for _ in range(2))
        sign = rng.choice(operations)
        return {"question": f"{left}{sign}{right}", "answer": str(OPERATIONS[sign](left, right))}

    return draw_tasks(draw, split, num_tasks, seed)
