"""Arithmetic with a calculator tool: the model calls the tool, reads its result, and replies with the number.

Left out: word problems. The task is the use of the tool.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from headrace.environments import arguments
from headrace.environments.base import Context
from headrace.environments.chat import Chat, ToolError
from headrace.environments.script import call_tool, perturb_reply
from headrace.environments.shipped.common import DrawnEnvironment, draw_tasks, replies
from headrace.environments.shipped.expression import BadExpression, evaluate, format_value
from headrace.rollout.types import Message, Rollout, Task

OPERATORS = "+-*/%"
USED_TOOL_REWARD = 0.2
"""Reward if the calculator has shown the right value."""
END_CHARACTERS = 200
"""Length of the end of a reply in which its number must be."""
_LAST_NUMBER = re.compile(r"(?<![\w.,])(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\W*$", re.ASCII)


@dataclass(eq=False)
class Calculator(DrawnEnvironment):
    """`min_terms` to `max_terms` numbers of `min_digits` to `max_digits` digits, joined by some of `operators`.

    A `terse` prompt is "12*7=?" and does not describe the tool, which is then calc(e): for the smallest models, which
    learn about the tool from demonstrations.
    """

    num_tasks: int = 2000
    min_terms: int = 2
    max_terms: int = 3
    min_digits: int = 2
    max_digits: int = 4
    operators: str = "+-*"
    max_turns: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole("min_terms", self.min_terms, 2)
        arguments.check_whole("max_terms", self.max_terms, self.min_terms, 8)
        arguments.check_whole("min_digits", self.min_digits, 1)
        arguments.check_whole("max_digits", self.max_digits, self.min_digits, 9)
        arguments.check_letters("operators", self.operators, OPERATORS)
        arguments.check_whole("max_turns", self.max_turns, 2)

    def tasks(self) -> list[dict[str, Any]]:
        return list(draw_tasks(self._draw, self.split, self.num_tasks, self.seed))

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        value = evaluate(task.data["expression"])
        shown: list[Fraction] = []
        expression = self._expression(task)
        question = f"What is {expression}? Use the calculator, then end your reply with the number it shows."
        question = f"{expression}=?" if self.terse else question
        tools, described = [self._make_tool(shown)], not self.terse
        chat = Chat(context, question, tools=tools, describe_tools=described, max_turns=self.max_turns)
        reply = await chat.act()
        correct = reply is not None and is_right(reply.text, value)
        rewards = {"correct": float(correct), "used_tool": USED_TOOL_REWARD * (value in shown)}
        return [chat.rollout(rewards, {"turns": len(chat.turns)})]

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        """Return a call of the tool, then its result, once it is right or no turn is left for another call."""
        answer: str = task.data["answer"]
        shown = any(message["role"] == "tool" and message["content"] == answer for message in messages)
        if shown or len(replies(messages)) + 1 >= self.max_turns:
            return answer
        expression = self._expression(task)
        return call_tool("calc", e=expression) if self.terse else call_tool("calculate", expression=expression)

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        """Return a wrong number, or a call with another expression."""
        gold = self.gold(task, messages)
        if isinstance(gold, str) or rng.random() < 0.5:
            value = evaluate(task.data["expression"])
            return format_value(value + rng.randint(1, 9) * max(1, abs(value) // 10))
        return perturb_reply(gold, rng)

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw numbers and operators, sometimes with parentheses, without a division by zero."""
        while True:
            terms = []
            for _ in range(rng.randint(self.min_terms, self.max_terms)):
                digits = rng.randint(self.min_digits, self.max_digits)
                terms.append(str(rng.randrange(10 ** (digits - 1), 10**digits)))
            if len(terms) > 2 and rng.random() < 0.5:
                index = rng.randrange(len(terms) - 1)
                terms[index], terms[index + 1] = f"({terms[index]}", f"{terms[index + 1]})"
            expression = terms[0] + "".join(f" {rng.choice(self.operators)} {term}" for term in terms[1:])
            try:
                return {"expression": expression, "answer": format_value(evaluate(expression))}
            except BadExpression:
                continue

    def _expression(self, task: Task) -> str:
        expression: str = task.data["expression"]
        return expression.replace(" ", "") if self.terse else expression

    def _make_tool(self, shown: list[Fraction]) -> Callable[..., str]:
        """Return the calculator of one episode; it appends its results to `shown`."""

        def calculate(expression: str) -> str:
            """The value of an arithmetic expression with + - * / // % ** and parentheses."""
            try:
                shown.append(evaluate(expression))
            except BadExpression as error:
                raise ToolError(str(error)) from None
            return format_value(shown[-1])

        def calc(e: str) -> str:
            return calculate(e)

        return calc if self.terse else calculate


def is_right(text: str, value: Fraction) -> bool:
    """Return whether a reply ends with this number, at least as exactly as the calculator shows it."""
    match = _LAST_NUMBER.search(text[-END_CHARACTERS:].replace("\N{MINUS SIGN}", "-"))
    if match is None or (match.start() == 0 and len(text) > END_CHARACTERS):  # a longer number may be cut
        return False
    number = Fraction(match[1].replace(",", ""))
    return abs(number - value) <= abs(Fraction(format_value(value)) - value)
