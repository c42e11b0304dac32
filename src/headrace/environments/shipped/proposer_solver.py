"""A proposer invents a problem and several solvers try it: one policy learns both roles.

A problem is arithmetic: two whole numbers and an operator, within the bounds of the task. A solver is rewarded for the
right value. A proposer is rewarded for a problem from which solvers can learn:

    learnable = 1 - |2 m - 1|,   m the share of solvers that were right: 1 where half are, 0 where all or none are

and a little for keeping within the bounds. A problem outside of them scores 0, and its episode has no solvers.

Left out on purpose: a memory of earlier proposals. Each task requests a problem with a given number, which keeps
proposers from repeating one problem.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat
from headrace.environments.shipped.arithmetic import OPERATIONS
from headrace.environments.shipped.common import DrawnEnvironment, draw_tasks
from headrace.rollout.types import Message, Rollout, Task

VALID_REWARD = 0.1
"""Reward for a problem within the bounds."""
MAX_DIGITS = 9
MAX_SOLVERS = 64
_PROBLEM = re.compile(r"(0|[1-9]\d*) ?([-+*]) ?(0|[1-9]\d*)", re.ASCII)

Problem = tuple[int, str, int]


@dataclass(eq=False)
class ProposerSolver(DrawnEnvironment):
    """Problems of two numbers of up to `max_digits` digits and one of `operators`, tried by `num_solvers`.

    Terse prompts are "7+" for the proposer and "7+35=" for the solvers; a terse reply is a problem or a number alone.
    """

    num_solvers: int = 4
    max_digits: int = 2
    operators: str = "+-"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole("num_solvers", self.num_solvers, 1, MAX_SOLVERS)
        arguments.check_whole("max_digits", self.max_digits, 1, MAX_DIGITS)
        arguments.check_letters("operators", self.operators, OPERATIONS)

    def tasks(self) -> list[dict[str, Any]]:
        """Return tasks of a number and an operator for the problem, and another number that would do."""

        def identity(task: dict[str, Any]) -> list[Any]:
            return [task["number"], task["operator"]]

        def draw(rng: random.Random) -> dict[str, Any]:
            number, operator, other = self._draw_number(rng), rng.choice(self.operators), self._draw_number(rng)
            return {"number": number, "operator": operator, "other": other}

        return list(draw_tasks(draw, self.split, self.num_tasks, self.seed, identity))

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        proposer = Chat(context, self._write_request(task), agent="proposer", max_turns=1)
        reply = await proposer.reply()
        problem = None if reply is None or reply.truncated else self._read_proposal(reply.text, task)
        if problem is None:
            return [proposer.rollout({"learnable": 0.0, "valid": 0.0}, {"invalid": 1.0})]
        expression = ("" if self.terse else " ").join(map(str, problem))
        question = f"What is {expression}? Write the number between <answer> and </answer>."
        question = f"{expression}=" if self.terse else question
        solvers = [Chat(context, question, agent="solver", max_turns=1) for _ in range(self.num_solvers)]
        value = str(_solve(problem))
        right = [float(self.read(text, "answer") == value) for text in await _sample_replies(solvers)]
        share = sum(right) / len(right)
        rewards = {"learnable": 1 - abs(2 * share - 1), "valid": VALID_REWARD}
        return [
            proposer.rollout(rewards, {"invalid": 0.0, "solved": share}),
            *(chat.rollout({"correct": correct}) for chat, correct in zip(solvers, right, strict=True)),
        ]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """Return the answer of a solver, or for a proposer the task's own problem."""
        problem = _find_problem(messages)
        if problem is None:
            return self._write_proposal(task, task.data["other"])
        return self.write("answer", _solve(problem))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        """Return a wrong number of a solver, or for a proposer another problem, since none is wrong."""
        problem = _find_problem(messages)
        if problem is None:
            return self._write_proposal(task, self._draw_number(rng))
        return self.write("answer", _solve(problem) + rng.choice((-1, 1)) * rng.randint(1, 9))

    def _draw_number(self, rng: random.Random) -> int:
        """Draw a number whose number of digits is uniform."""
        return rng.randrange(10 ** rng.randint(1, self.max_digits))

    def _write_request(self, task: Task) -> str:
        number, operator = task.data["number"], task.data["operator"]
        if self.terse:
            return f"{number}{operator}"
        return (
            f"Invent an arithmetic problem: two whole numbers of at most {self.max_digits} digits with {operator} "
            f"between them, one of which is {number}. Others will try to solve it, and the best one is solved by half "
            f"of them. Write it between <problem> and </problem>."
        )

    def _write_proposal(self, task: Task, other: int) -> str:
        return self.write("problem", f"{task.data['number']}{task.data['operator']}{other}")

    def _read_proposal(self, text: str, task: Task) -> Problem | None:
        """Return the problem of a reply; None if it is not within the bounds of the task."""
        written = self.read(text, "problem")
        match = _PROBLEM.fullmatch(written) if len(written) <= 2 * self.max_digits + 3 else None
        if match is None or max(len(match[1]), len(match[3])) > self.max_digits:
            return None
        problem = int(match[1]), match[2], int(match[3])
        valid = problem[1] == task.data["operator"] and task.data["number"] in (problem[0], problem[2])
        return problem if valid else None


async def _sample_replies(chats: Sequence[Chat]) -> list[str]:
    """Return the replies of all chats, sampled concurrently; if one fails, the others are cancelled."""
    pending = [asyncio.ensure_future(chat.reply()) for chat in chats]
    try:
        await asyncio.gather(*pending)
    finally:
        for reply in pending:
            reply.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return [chat.text for chat in chats]


def _find_problem(messages: Sequence[Message]) -> Problem | None:
    """Return the problem in a solver's prompt; None in a proposer's."""
    match = _PROBLEM.search(messages[0]["content"])
    return None if match is None else (int(match[1]), match[2], int(match[3]))


def _solve(problem: Problem) -> int:
    left, operator, right = problem
    return OPERATIONS[operator](left, right)
