"""Repeat a word: the easiest task there is, for a first look at a new model or a new set-up."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import Any

from headrace.environments.rewards.exact import Exact
from headrace.environments.shipped.drawing import draw_tasks
from headrace.environments.shipped.reverse_text import LONGEST, similarity
from headrace.environments.single_turn import environment


def words(
    split: str = "train", num_tasks: int = 2000, min_letters: int = 4, max_letters: int = 8, seed: int = 0
) -> list[dict[str, Any]]:
    """Random words of a few letters."""

    def draw(rng: random.Random) -> dict[str, Any]:
        return {"answer": "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_letters, max_letters)))}

    return draw_tasks(draw, split, num_tasks, seed)


def similar(text: str, data: Mapping[str, Any]) -> float:
    return similarity(text[: LONGEST * len(data["answer"])], data["answer"])


@environment(data=words, rewards={"similarity": similar}, metrics={"exact": Exact()})
def copying(row: dict[str, Any]) -> str:
    """Write the word that the user wrote."""
    return str(row["answer"])
