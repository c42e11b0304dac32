"""Knights and knaves in the shorthand of examples/knights-knaves: every puzzle of two people and statements of depth 2.

Statements and rewards are those of reasoning-gym's family, of which a puzzle has exactly one solution; these need no
library and no sandbox. The reward is 1 for the solution, and .65 for one right role.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.environments.adapters.reasoning_gym_family import is_held_out
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.rollout.types import Rollout, Task

sys.path.append(str(Path(__file__).parents[2] / "examples/knights-knaves"))  # as its run files do
from islanders import NAMES, Islanders, assignment, shortened

PEOPLE = 2
Statement = tuple[Any, ...]


class Puzzles(Islanders):
    def tasks(self) -> list[dict[str, Any]]:
        questions: dict[str, str] = {}
        for statements in itertools.product(*(list(said_by(person)) for person in range(PEOPLE))):
            solutions = [
                roles
                for roles in itertools.product((True, False), repeat=PEOPLE)
                if all(is_true(said, roles) == role for said, role in zip(statements, roles, strict=True))
            ]
            if len(solutions) == 1:
                said = (f"{name}: {shortened(one)}." for name, one in zip(NAMES, statements, strict=False))
                questions[" ".join(said)] = assignment(solutions[0])
        return [
            {"question": question, "answer": answer, "metadata": {"names": list(NAMES[:PEOPLE])}}
            for question, answer in questions.items()
            if is_held_out(question) == self._held_out
        ]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, self.question(task.data))
        await chat.reply()
        right = right_share(chat.text, task.data["answer"])
        return [chat.rollout({"score": 0.3 + 0.7 * right if right else 0.0}, {"solved": float(right == 1)})]


def right_share(answer: str, solution: str) -> float:
    """Return the share of right roles, 0 if the answer does not have the form of the solution."""
    words, expected = answer.split(), solution.split()
    if len(words) != len(expected) or words[::2] != expected[::2] or not {*words[1::2]} <= {"knight", "knave"}:
        return 0.0
    return sum(a == b for a, b in zip(words[1::2], expected[1::2], strict=True)) / PEOPLE


def said_by(speaker: int) -> Iterator[Statement]:
    """Yield all statements of depth 2. A speaker never says "I am a knave", which is a contradiction."""
    roles = itertools.product(("telling-truth", "lying"), range(PEOPLE))
    simple = [role for role in roles if role != ("lying", speaker)]
    yield from simple
    yield from (("not", role) for role in simple)
    for operator in ("and", "or", "->", "<=>"):
        yield from ((operator, *pair) for pair in itertools.permutations(simple, 2))


def is_true(said: Statement, roles: tuple[bool, ...]) -> bool:
    operator, *operands = said
    if operator in ("telling-truth", "lying"):
        return roles[operands[0]] == (operator == "telling-truth")
    left, *others = (is_true(part, roles) for part in operands)
    match operator:
        case "not":
            return not left
        case "and":
            return left and others[0]
        case "or":
            return left or others[0]
        case "->":
            return not left or others[0]
        case _:
            return left == others[0]
