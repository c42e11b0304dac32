"""A proposer invents a problem, several solvers try it: one policy learns to ask as well as to answer.

A problem is arithmetic: two whole numbers and an operator, within bounds that the task sets. What it comes to is
computed, so a solver's reward is to be right. A proposer's reward is how much there is to learn from its problem:

    learnable = 1 - |2 m - 1|,   m the share of solvers that were right: 1 where half are, 0 where all or none are

and a little for keeping to the bounds. A problem outside of them is worth nothing and is shown to nobody: then the
episode has no solvers.

Left out on purpose: a memory of what was proposed before. What keeps proposers from asking the same for ever is that
each task asks for a problem with a number of its own.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.arithmetic import OPERATIONS
from headrace.environments.shipped.drawing import Drawn, draw_tasks
from headrace.environments.shipped.tags import tag, tagged
from headrace.rollout.types import Message, Rollout, Task

VALID = 0.1
"""What it is worth to propose what was asked for."""
MOST_DIGITS = 9
MOST_SOLVERS = 64
_PROBLEM = re.compile(r"(0|[1-9]\d*) ?([-+*]) ?(0|[1-9]\d*)", re.ASCII)

Problem = tuple[int, str, int]


class ProposerSolver(Drawn):
    """Problems of two numbers of up to `max_digits` digits and one of `operators`, tried by `num_solvers`.

    `terse` asks the proposer "7+" and the solvers "7+35=", and a reply is a problem or a number alone.
    """

    def __init__(
        self,
        split: str = "train",
        num_tasks: int = 1000,
        num_solvers: int = 4,
        max_digits: int = 2,
        operators: str = "+-",
        terse: bool = False,
        seed: int = 0,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        super().__init__(split, num_tasks, seed, demonstrate_mistakes)
        arguments.check_whole("num_solvers", num_solvers, 1, MOST_SOLVERS)
        arguments.check_whole("max_digits", max_digits, 1, MOST_DIGITS)
        arguments.check_letters("operators", operators, OPERATIONS)
        arguments.check_flag("terse", terse)
        self.num_solvers = num_solvers
        self.max_digits = max_digits
        self.operators = operators
        self.terse = terse

    def tasks(self) -> list[dict[str, Any]]:
        """A number and an operator to make a problem of, and another number that would do."""

        def identity(task: dict[str, Any]) -> list[Any]:
            return [task["number"], task["operator"]]

        return list(draw_tasks(self._draw, self.split, self.num_tasks, self.seed, identity))

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        proposer = Chat(context, self._request(task), agent="proposer", max_turns=1)
        reply = await proposer.reply()
        problem = None if reply is None or reply.truncated else self._proposed(reply.text, task)
        if problem is None:
            return [proposer.rollout({"learnable": 0.0, "valid": 0.0}, {"invalid": 1.0})]
        solvers = [Chat(context, self._question(problem), agent="solver", max_turns=1) for _ in range(self.num_solvers)]
        right = [float(self._is_right(text, problem)) for text in await _replies(solvers)]
        share = sum(right) / len(right)
        rewards = {"learnable": 1 - abs(2 * share - 1), "valid": VALID}
        return [
            proposer.rollout(rewards, {"invalid": 0.0, "solved": share}),
            *(chat.rollout({"correct": correct}) for chat, correct in zip(solvers, right, strict=True)),
        ]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """To a solver the answer, to a proposer the problem that came with the task."""
        problem = _problem_in(messages)
        return self._proposal(task, task.data["other"]) if problem is None else self._answer(_value(problem))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """To a solver a wrong number; to a proposer another problem, since none of them is wrong."""
        problem = _problem_in(messages)
        if problem is None:
            return self._proposal(task, self._number(rng))
        return self._answer(_value(problem) + rng.choice((-1, 1)) * rng.randint(1, 9))

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        return {"number": self._number(rng), "operator": rng.choice(self.operators), "other": self._number(rng)}

    def _number(self, rng: random.Random) -> int:
        """As often of one digit as of two, and so on."""
        return rng.randrange(10 ** rng.randint(1, self.max_digits))

    def _request(self, task: Task) -> str:
        number, operator = task.data["number"], task.data["operator"]
        if self.terse:
            return f"{number}{operator}"
        return (
            f"Invent an arithmetic problem: two whole numbers of at most {self.max_digits} digits with {operator} "
            f"between them, one of which is {number}. Others will try to solve it, and the best one is solved by half "
            f"of them. Write it between <problem> and </problem>."
        )

    def _question(self, problem: Problem) -> str:
        left, operator, right = problem
        if self.terse:
            return f"{left}{operator}{right}="
        return f"What is {left} {operator} {right}? Write the number between <answer> and </answer>."

    def _proposal(self, task: Task, other: int) -> str:
        problem = f"{task.data['number']}{task.data['operator']}{other}"
        return problem if self.terse else tag("problem", problem)

    def _answer(self, number: int) -> str:
        return str(number) if self.terse else tag("answer", str(number))

    def _proposed(self, text: str, task: Task) -> Problem | None:
        """The problem that a reply is, if it is one and as it was asked for."""
        written = (text if self.terse else tagged(text, "problem") or "").strip()
        found = _PROBLEM.fullmatch(written) if len(written) <= 2 * self.max_digits + 3 else None
        if found is None or max(len(found[1]), len(found[3])) > self.max_digits:
            return None
        problem = int(found[1]), found[2], int(found[3])
        asked = problem[1] == task.data["operator"] and task.data["number"] in (problem[0], problem[2])
        return problem if asked else None

    def _is_right(self, text: str, problem: Problem) -> bool:
        given = text if self.terse else tagged(text, "answer") or ""
        return given.strip() == str(_value(problem))


async def _replies(chats: Sequence[Chat]) -> list[str]:
    """What each of them is answered, all asked at once; one that fails costs the others."""
    asked = [asyncio.ensure_future(chat.reply()) for chat in chats]
    try:
        await asyncio.gather(*asked)
    finally:
        for reply in asked:
            reply.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return [chat.text for chat in chats]


def _problem_in(messages: Sequence[Message]) -> Problem | None:
    """The problem that is asked; None where one is asked for."""
    found = _PROBLEM.search(messages[0]["content"])
    return None if found is None else (int(found[1]), found[2], int(found[3]))


def _value(problem: Problem) -> int:
    left, operator, right = problem
    return OPERATIONS[operator](left, right)
