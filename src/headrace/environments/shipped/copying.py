"""Repeat a word: the easiest task, for a first run of a new model or a new set-up."""

from __future__ import annotations

import random
import string
from typing import Any

from headrace.environments.arguments import check_whole
from headrace.environments.rewards.text_rewards import Exact
from headrace.environments.shipped.drawing import draw_tasks
from headrace.environments.shipped.texts import reply_similarity
from headrace.environments.single_turn import SingleTurn


class Copying(SingleTurn):
    """Repeat the user's word of `min_letters` to `max_letters` random letters."""

    def __init__(
        self,
        split: str = "train",
        num_tasks: int = 2000,
        min_letters: int = 4,
        max_letters: int = 8,
        seed: int = 0,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        check_whole("min_letters", min_letters, 1)
        check_whole("max_letters", max_letters, min_letters)

        def draw(rng: random.Random) -> dict[str, Any]:
            return {"answer": "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_letters, max_letters)))}

        super().__init__(
            draw_tasks(draw, split, num_tasks, seed),
            lambda row: str(row["answer"]),
            {"similarity": lambda text, row: reply_similarity(text, row["answer"])},
            metrics={"exact": Exact()},
            demonstrate_mistakes=demonstrate_mistakes,
        )
