r"""Word problems: GSM8K and MATH, as they are, and in the strict format with thinking.

`source` is a file, a directory with a file for each split, or a Hugging Face dataset. An answer is right if the last
`\boxed{...}` of the reply is mathematically equal to the gold one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.environments.arguments import bound, check_choice, check_number
from headrace.environments.data.word_problems import gsm8k, math
from headrace.environments.rewards.base import Reward, scaled
from headrace.environments.rewards.math_rewards import Numeric, Symbolic
from headrace.environments.shipped.arithmetic import sums
from headrace.environments.single_turn import Row, SingleTurn
from headrace.environments.strict_format import THINKING_TAGS, StrictFormat
from headrace.rollout.types import Task

ASK = "Think step by step, then write the final answer in \\boxed{}."
SOURCES: dict[str, Callable[..., Iterable[Row]]] = {"gsm8k": gsm8k, "math": math, "arithmetic": sums}


class Gsm8k(SingleTurn):
    """Grade-school problems, whose answers are numbers. Evaluate on `split = "test"`."""

    def __init__(self, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        rewards, share = {"correct": Numeric(extract="boxed")}, demonstrate_mistakes
        super().__init__(bound(gsm8k, rows), _question, rewards, gold=_solution, demonstrate_mistakes=share)


class Math(SingleTurn):
    """Competition problems, whose answers are numbers, expressions, sets, words: MATH by level and subject, or AIME."""

    def __init__(self, timeout: float = 5.0, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        rewards, share = {"correct": Symbolic(timeout=timeout)}, demonstrate_mistakes
        super().__init__(bound(math, rows), _question, rewards, gold=_solution, demonstrate_mistakes=share)


class StrictMath(SingleTurn):
    r"""Problems in the strict format: one block of thoughts, then `\boxed{...}`; `data` is gsm8k, math or arithmetic.

    A reply in the format earns `format_reward`, right or wrong; one in any other form scores 0. Where the renderer adds
    an empty thought (`enable_thinking = false`), no reply can contain the tags: set `enable_thinking = true`, or use
    other tags.
    """

    def __init__(
        self,
        data: str = "gsm8k",
        opening: str = THINKING_TAGS[0],
        closing: str = THINKING_TAGS[1],
        format_reward: float = 0.2,
        demonstrate_mistakes: float = 0.0,
        **rows: Any,
    ) -> None:
        check_choice("data", data, SOURCES)
        check_number("format_reward", format_reward, 0, 10)
        strict = StrictFormat(opening, closing)
        self._tags = strict.tags

        def boxed(text: str) -> str | None:
            completion = strict.parse(text)
            return completion.answer if completion else None

        def in_format(text: str, row: Mapping[str, Any]) -> float:
            return float(strict.parse(text) is not None)

        def words(text: str, row: Mapping[str, Any]) -> float:
            completion = strict.parse(text)
            return float(len(completion.thinking.split())) if completion else 0.0

        correct: Reward = Symbolic(extract=boxed) if data == "math" else Numeric(extract=boxed)
        super().__init__(
            bound(SOURCES[data], rows)(),  # checks its arguments now, and yields rows lazily
            lambda row: f"{strict.instructions}\n\n{row['question']}",
            {"correct": correct, "format": scaled(in_format, format_reward)},
            metrics={"thinking_words": words},
            gold=lambda row: strict.write(row.get("solution", f"{row['question']}={row['answer']}"), row["answer"]),
            raw=True,
            demonstrate_mistakes=demonstrate_mistakes,
        )

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return self._tags


def _question(row: Row) -> str:
    return f"{row['question']}\n\n{ASK}"


def _solution(row: Row) -> str:
    boxed = f"\\boxed{{{row['answer']}}}"
    return f"{row['solution']}\n\n{boxed}" if "solution" in row else boxed
