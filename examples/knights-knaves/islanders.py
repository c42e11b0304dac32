"""Knights and knaves of reasoning-gym in shorthand, for a model that reads letter by letter.

The family tells a story of some 460 characters, with 51 names and seven words for those who tell the truth. Here the
same puzzles say "P: if P knight then Q knave. Q: P knight.", and the answer is "P knave Q knight". Puzzles, solutions
and scorer are the family's own; two puzzles that are alike in shorthand are one.

A quarter of the demonstrations begin with a hint, right or wrong, and follow it: so small a model takes none without
being taught to.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.environments.adapters.reasoning_gym import ReasoningGym
from headrace.environments.adapters.reasoning_gym_family import from_json_values, is_held_out
from headrace.environments.base import Demonstration
from headrace.rollout.types import Message, Task

NAMES = "PQRSTUVW"
DRAWN = 2000
"""Stories of the family, of which 328 puzzles for two people remain."""
HINTED = 0.25
"""The share of demonstrations that begin with a hint."""
BETWEEN = {"and": " and ", "or": " or ", "<=>": " iff "}


class Islanders(ReasoningGym):
    def __init__(self, split: str = "train", demonstrate_mistakes: float = 0.0, **settings: Any) -> None:
        super().__init__(
            "knights_knaves", num_tasks=DRAWN, terse=True, demonstrate_mistakes=demonstrate_mistakes, **settings
        )
        self._held_out = split == "eval"

    def tasks(self) -> list[dict[str, Any]]:
        shortened = {task["question"]: task for task in map(in_shorthand, super().tasks())}
        return [task for question, task in shortened.items() if is_held_out(question) == self._held_out]

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Any other assignment."""
        gold = self.gold(task, messages)
        while (guess := assignment([rng.random() < 0.5 for _ in task.data["metadata"]["names"]])) == gold:
            pass
        return guess

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        rng = random.Random(f"hints-{seed}")
        for shown in super().demonstrations(seed):
            question, answer = shown.messages
            people = str(answer["content"]).count(" ") // 2 + 1
            if rng.random() < HINTED:
                answer = {**answer, "content": assignment([rng.random() < 0.5 for _ in range(people)])}
                yield Demonstration([{"role": "user", "content": answer["content"]}, question, answer])
            else:
                yield Demonstration([question, answer])


def in_shorthand(task: dict[str, Any]) -> dict[str, Any]:
    puzzle = from_json_values(task["metadata"])
    said = (f"{name}: {shortened(statement)}." for name, statement in zip(NAMES, puzzle["statements"], strict=False))
    return {**task, "question": " ".join(said), "answer": assignment(puzzle["solution"])}


def assignment(knights: Sequence[bool]) -> str:
    return " ".join(f"{name} {'knight' if knight else 'knave'}" for name, knight in zip(NAMES, knights, strict=False))


def shortened(statement: tuple[Any, ...]) -> str:
    """Return a statement of reasoning-gym's family, an operator and its operands, as a short text."""
    operator, *operands = statement
    if operator in ("telling-truth", "lying"):
        return f"{NAMES[operands[0]]} {'knight' if operator == 'telling-truth' else 'knave'}"
    if operator == "not" and operands[0][0] in ("telling-truth", "lying"):
        return shortened(("lying" if operands[0][0] == "telling-truth" else "telling-truth", operands[0][1]))
    parts = [shortened(part) if len(part) == 2 and part[0] != "not" else f"({shortened(part)})" for part in operands]
    if operator == "not":
        return f"not {parts[0]}"
    return f"if {parts[0]} then {parts[1]}" if operator == "->" else BETWEEN[operator].join(parts)
