"""Sums, differences and products of whole numbers; the answer must be the number and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from headrace.environments.arguments import bind_args, check_flag, check_letters, check_whole
from headrace.environments.rewards.text_rewards import Exact
from headrace.environments.shipped.common import draw_tasks
from headrace.environments.single_turn import SingleTurn

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Arithmetic(SingleTurn):
    """Two numbers of up to `digits` digits and one of `operations`; a `terse` prompt is "12+7="."""

    def __init__(self, terse: bool = False, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        check_flag("terse", terse)
        prompt = "{question}=" if terse else "What is {question}? Answer with the number alone."
        rewards, share = {"correct": Exact()}, demonstrate_mistakes
        tasks = bind_args(draw_sums, rows, caller=type(self))()
        super().__init__(tasks, prompt.format_map, rewards, demonstrate_mistakes=share)


def draw_sums(
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
