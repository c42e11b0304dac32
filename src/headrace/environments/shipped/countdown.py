"""Reach a target from a few numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from headrace.environments.arguments import bind_args, check_flag, check_number, check_whole
from headrace.environments.rewards.base import scaled
from headrace.environments.shipped.common import draw_tasks, extract_tagged, tag
from headrace.environments.shipped.expression import BadExpression, evaluate
from headrace.environments.single_turn import SingleTurn

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
_FORBIDDEN_OPERATIONS = re.compile(r"\*\*|//|[.%]")
"""Operations that `evaluate` supports and this game does not allow."""


class Countdown(SingleTurn):
    """`numbers` numbers from 1 to `largest`; every task has a solution. A `terse` prompt is "3 5 7=22".

    An expression of the right numbers with any value earns `format_reward`.
    """

    def __init__(
        self, format_reward: float = 0.1, terse: bool = False, demonstrate_mistakes: float = 0.0, **tasks: Any
    ) -> None:
        check_number("format_reward", format_reward, 0, 1)
        check_flag("terse", terse)
        self._terse = terse
        rewards = {
            "solved": lambda text, row: float(self._value(text, row) == row["target"]),
            "format": scaled(lambda text, row: float(self._value(text, row) is not None), format_reward),
        }
        super().__init__(
            bind_args(draw_puzzles, tasks, caller=type(self))(),
            self._write_prompt,
            rewards,
            gold=lambda row: row["solution"] if terse else tag("answer", row["solution"]),
            demonstrate_mistakes=demonstrate_mistakes,
        )

    def _write_prompt(self, row: dict[str, Any]) -> str:
        numbers = [str(number) for number in row["numbers"]]
        if self._terse:
            return f"{' '.join(numbers)}={row['target']}"
        return (
            f"Write an expression that equals {row['target']}. Use each of the numbers {', '.join(numbers)} exactly "
            "once, with + - * / and parentheses. Answer with <answer>your expression</answer>."
        )

    def _value(self, text: str, data: Mapping[str, Any]) -> Fraction | None:
        """Return the value of the answer; None if it is not an expression of exactly these numbers."""
        expression = text.strip() if self._terse else (extract_tagged(text, "answer") or "").strip()
        try:
            value = evaluate(expression)
        except BadExpression:
            return None
        used = sorted(int(number) for number in re.findall(r"\d+", expression))
        return value if used == sorted(data["numbers"]) and not _FORBIDDEN_OPERATIONS.search(expression) else None


def draw_puzzles(
    split: str = "train", num_tasks: int = 2000, numbers: int = 4, largest: int = 50, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield numbers, and as the target a positive whole number that they can be combined to, with the solution."""
    check_whole("numbers", numbers, 2, 8)
    check_whole("largest", largest, 1, 10**6)

    def draw(rng: random.Random) -> dict[str, Any]:
        while True:
            drawn = [rng.randint(1, largest) for _ in range(numbers)]
            solution, target = _combine(rng, drawn)
            if target.denominator == 1 and 0 < target <= 100 * largest:
                return {"numbers": drawn, "target": int(target), "solution": solution}

    return draw_tasks(draw, split, num_tasks, seed, identity=lambda task: [sorted(task["numbers"]), task["target"]])


def _combine(rng: random.Random, numbers: list[int]) -> tuple[str, Fraction]:
    """Combine two random numbers by a random operation until one is left; return the expression and its value."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (left, one), (right, other) = parts.pop(), parts.pop()
        sign = rng.choice("+-*/" if other and (one / other).denominator == 1 else "+-*")
        parts.append((f"({left}{sign}{right})", OPERATIONS[sign](one, other)))
    expression, value = parts[0]
    return expression.removeprefix("(").removesuffix(")"), value
