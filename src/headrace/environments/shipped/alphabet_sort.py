"""Sort names, and keep the list sorted as each turn adds more of them.

A turn is rewarded by the similarity of the two lists, item by item; a turn that was not reached scores 0. Left out:
marks beside the names that are new.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.common import DrawnEnvironment, draw_tasks, replies, reply_similarity, tag, word_list
from headrace.rollout.types import Message, Rollout, Task

MAX_ITEMS = {"names": 80, "letters": 26}
"""Number of items to draw from."""
MAX_ANSWER_CHARACTERS = 10_000
"""Characters of an answer that are read; no correct one is as long."""


@dataclass(eq=False)
class AlphabetSort(DrawnEnvironment):
    """Lists of `items`: names, or single letters for the smallest models; `terse` prompts have no instructions.

    `sort_by` is "first" or "last" name, or "either", which draws one of the two for each task. The similarity of each
    turn is raised to `similarity_power`. The items of a first question in `eval` are in no first question of `train`.
    """

    min_turns: int = 1
    max_turns: int = 3
    min_names_per_turn: int = 1
    max_names_per_turn: int = 5
    items: str = "names"
    sort_by: str = "first"
    similarity_power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_choice("items", self.items, MAX_ITEMS)
        most = MAX_ITEMS[self.items]
        arguments.check_whole("min_turns", self.min_turns, 1)
        arguments.check_whole("max_turns", self.max_turns, self.min_turns, most // 2)
        low = self.min_names_per_turn
        arguments.check_whole("min_names_per_turn", low, 1)
        arguments.check_whole("max_names_per_turn", self.max_names_per_turn, max(2, low), most // self.max_turns)
        arguments.check_choice("sort_by", self.sort_by, ("first", "last", "either"))
        arguments.check_number("similarity_power", self.similarity_power, 0.1, 100)
        if self.sort_by != "first" and (self.terse or self.items == "letters"):
            fact = "only names can be sorted so, and only with terse = false, whose instruction says how"
            raise arguments.BadArgument(fact, key="sort_by", value=self.sort_by, fix="Leave sort_by at 'first'.")

    def tasks(self) -> list[dict[str, Any]]:
        def first_items(task: dict[str, Any]) -> list[str]:
            return sorted(task["batches"][0])

        return list(draw_tasks(self._draw, self.split, self.num_tasks, self.seed, split_by=first_items))

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        batches = task.data["batches"]
        chat = Chat(context, self._question(task, 0), max_turns=len(batches))
        turns: list[float] = []
        while reply := await chat.reply():
            wanted = sort_items(task, len(turns) + 1)
            body = self.read(reply.text, "sorted")[:MAX_ANSWER_CHARACTERS]
            listed = body.split() if self.items == "letters" else [line.strip() for line in body.splitlines()]
            turns.append(reply_similarity([item for item in listed if item], wanted))
            if len(turns) < len(batches):
                chat.say(self._question(task, len(turns)))
            else:
                chat.stop("done")
        score = sum(turn**self.similarity_power for turn in turns) / len(batches)
        return [chat.rollout({"similarity": score}, {"exact": turns.count(1.0) / len(batches)})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        return self._write(sort_items(task, len(replies(messages)) + 1))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Return the list with the new names appended unsorted."""
        turn = len(replies(messages))
        listed = [*sort_items(task, turn), *task.data["batches"][turn]]
        if listed == sort_items(task, turn + 1):
            listed[-2:] = reversed(listed[-2:])
        return self._write(listed)

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw the batches of a task. The first is never sorted already, so that copying it is wrong."""
        low, high = self.min_names_per_turn, self.max_names_per_turn
        sizes = [rng.randint(low, high) for _ in range(rng.randint(self.min_turns, self.max_turns))]
        sizes[0] = max(2, sizes[0])
        by = rng.choice(("first", "last")) if self.sort_by == "either" else self.sort_by
        while True:
            if self.items == "letters":
                drawn = rng.sample(string.ascii_lowercase, sum(sizes))
            else:
                names = (rng.sample(word_list(part), sum(sizes)) for part in ("first_names", "last_names"))
                drawn = [f"{first} {last}" for first, last in zip(*names, strict=True)]
            if drawn[: sizes[0]] != _sort_names(drawn[: sizes[0]], by):
                break
        starts = [sum(sizes[:turn]) for turn in range(len(sizes))]
        return {"batches": [drawn[start : start + size] for start, size in zip(starts, sizes, strict=True)], "by": by}

    def _question(self, task: Task, turn: int) -> str:
        listed = self._join_items(task.data["batches"][turn])
        if self.terse:
            return listed
        if turn:
            return f"Add these {self.items} and sort the whole list again:\n{listed}"
        by = f" by {task.data['by']} name" if self.items == "names" else ""
        form = "one name to a line" if self.items == "names" else "with spaces between the letters"
        return (
            f"Sort these {self.items} alphabetically{by}:\n{listed}\n\n"
            f"Write the sorted list between <sorted> and </sorted>, {form}."
        )

    def _join_items(self, items: Sequence[str]) -> str:
        return ("\n" if self.items == "names" else " ").join(items)

    def _write(self, items: Sequence[str]) -> str:
        return self._join_items(items) if self.terse else tag("sorted", f"\n{self._join_items(items)}\n")


def sort_items(task: Task, turns: int) -> list[str]:
    """Return all names of the first `turns` turns, sorted."""
    return _sort_names([name for batch in task.data["batches"][:turns] for name in batch], task.data["by"])


def _sort_names(names: Sequence[str], by: str) -> list[str]:
    return sorted(names, key=(lambda name: name.split()[::-1]) if by == "last" else str.split)
