r"""Sums of one digit, answered after thoughts; 1 for the right number in the strict format, whatever the thoughts.

The questions, and the start that thinks up to six times as long as it needs to, are those of
examples/hackable-gsm8k/miniature.
"""

from typing import Any

from headrace.environments.rewards.math_rewards import Numeric
from headrace.environments.shipped.arithmetic import draw_sums
from headrace.environments.single_turn import SingleTurn
from headrace.environments.strict_format import StrictFormat


class Sums(SingleTurn):
    def __init__(self, **rows: Any) -> None:
        def boxed(text: str) -> str | None:
            completion = StrictFormat().parse(text)
            return completion.answer if completion else None

        super().__init__(
            draw_sums(digits=1, operations="+-", **rows),
            lambda row: str(row["question"]),
            {"correct": Numeric(extract=boxed)},
            raw=True,
        )
