r"""Word problems: GSM8K and MATH, as they are, and in the strict format with thinking.

`source` is a file, a directory with a file for each split, or a Hugging Face dataset. An answer is right if the last
`\boxed{...}` of the reply is mathematically equal to the gold one.

GSM8K has grade-school problems. MATH, by Hendrycks et al., has competition problems of seven subjects and five levels.
Copies of it have different columns: `problem` or `question`, `type` or `subject`, a level as text or as a number, with
or without a column for the answer. AIME has neither subject nor level, and whole numbers as answers, often without a
solution: `problem`, `answer`, and perhaps `id` and `year`, in lower or upper case.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.arguments import BadArgument, bind_args, check_choice, check_number
from headrace.environments.rewards.answers import FINAL_ANSWER_MARK, boxed_answer
from headrace.environments.rewards.base import Reward, scaled
from headrace.environments.rewards.math_rewards import Numeric, Symbolic
from headrace.environments.shipped.arithmetic import draw_sums
from headrace.environments.single_turn import SingleTurn
from headrace.environments.strict_format import THINKING_TAGS, StrictFormat
from headrace.environments.tables import Row, read_located_rows
from headrace.rollout.types import Task

log = logging.getLogger(__name__)

GSM8K = "openai/gsm8k"
MATH = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra",
    "Precalculus",
)  # fmt: skip
QUESTION = ("question", "problem", "Question", "Problem")
ANSWER = ("answer", "Answer")
SOLUTION = ("solution", "Solution")
SUBJECT = ("subject", "type")
LEVEL_UNKNOWN = {"level": None, "subject": None}
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def gsm8k(
    source: str | Path = GSM8K, split: str = "train", limit: int | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows of `question`, `answer` (the number after `####`, without commas) and `solution` (the steps before).

    Calculator annotations in the solutions, `<<2*3=6>>`, are left out.
    """
    subset = "main" if str(source) == GSM8K else None
    for row in islice(read_located_rows(source, split, subset, columns), limit):
        worked = row.text("answer")
        steps, mark, answer = worked.rpartition(FINAL_ANSWER_MARK)
        if not mark or not answer.strip():
            raise row.error(f"no answer follows {FINAL_ANSWER_MARK} in {worked[-60:]!r}", key="answer")
        yield {
            "question": row.text("question"),
            "answer": answer.strip().replace(",", ""),
            "solution": _CALCULATOR.sub("", steps).strip(),
        }


def math(
    source: str | Path = MATH,
    split: str = "train",
    levels: Sequence[int] | None = None,
    subjects: Sequence[str] | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows of `question`, `answer`, `solution`, `level` (None where it is not known) and `subject`.

    Rows in the format of AIME have neither level nor subject (both None), a `solution` only where the data has one, and
    `id` and `year` if it has these. A problem whose solution has no boxed answer (there are two in the training split
    of MATH) is left out with a warning.
    """
    if subjects is not None and (isinstance(subjects, str) or not all(isinstance(one, str) for one in subjects)):
        raise BadArgument("expected a list of names", key="subjects", value=subjects, fix='For example ["Algebra"].')
    are_whole = isinstance(levels, Sequence) and all(isinstance(level, int) for level in levels)
    if levels is not None and not (are_whole and all(1 <= level <= 5 for level in levels)):
        fix = "For example [4, 5]."
        raise BadArgument("expected a list of numbers from 1 to 5", key="levels", value=levels, fix=fix)
    wanted = None if subjects is None else {_normalize_subject(subject) for subject in subjects}
    for subject in subjects or ():
        if _normalize_subject(subject) is None:
            fix = f"Subjects: {', '.join(SUBJECTS)}."
            raise BadArgument("unknown subject", key="subjects", value=subject, fix=fix)
    filters = [key for key, values in (("levels", levels), ("subjects", subjects)) if values is not None]
    tasks = filter(None, (_read_task(row, filters) for row in _read_rows(source, split, wanted, columns)))
    of_level = (task for task in tasks if levels is None or task["level"] in levels)
    yield from islice((task for task in of_level if wanted is None or task["subject"] in wanted), limit)


def _read_rows(
    source: str | Path, split: str, subjects: set[str | None] | None, columns: Mapping[str, str] | None
) -> Iterator[Row]:
    if str(source) != MATH:
        yield from read_located_rows(source, split, None, columns)
        return
    for subject in SUBJECTS:  # on the hub each of them is a subset
        if subjects is None or subject in subjects:
            subset = re.sub(r"\W+", "_", subject.lower().replace("&", "and"))
            yield from read_located_rows(source, split, subset, columns)


def _read_task(row: Row, filters: Sequence[str]) -> dict[str, Any] | None:
    """Return the task of a row; None, with a warning, if its solution has no boxed answer."""
    question = row.text(*QUESTION)
    solution = None if row.find(*SOLUTION) is None else row.text(*SOLUTION)
    answer = row.find(*ANSWER)
    if answer is None or answer == "":
        answer = boxed_answer(row.text(*ANSWER) if solution is None else solution)
    if answer is None:
        log.warning("%s:%d: left out, since its solution has no boxed answer", *row.place)
        return None
    worked = {} if solution is None else {"solution": solution}
    if isinstance(answer, float) and answer.is_integer():  # a table may store whole numbers as floats
        answer = int(answer)
    task = {"question": question, "answer": str(answer), **worked}
    if row.find(*SUBJECT) is None and "level" not in row.content:
        if filters:
            raise row.error("the data has neither levels nor subjects", key=filters[0], fix=f"Leave {filters[0]} out.")
        named = {name: row.find(name, name.upper(), name.capitalize()) for name in ("id", "year")}
        return task | {name: value for name, value in named.items() if value is not None} | LEVEL_UNKNOWN
    name = row.text(*SUBJECT)
    if (subject := _normalize_subject(name)) is None:
        raise row.error("unknown subject", key="subject", value=name, fix=f"Subjects: {', '.join(SUBJECTS)}.")
    return {**task, "level": _read_level(row), "subject": subject}


def _read_level(row: Row) -> int | None:
    level = row.find("level")
    digits = str(level).removeprefix("Level ").strip()
    if digits.isdecimal():
        return int(digits)
    if digits in ("?", "None"):
        return None
    raise row.error("expected a number or 'Level 1' to 'Level 5'", key="level", value=level)


def _normalize_subject(subject: str) -> str | None:
    """Return a subject as the data spells it; case, `_` and "and" do not matter."""
    spelled = {re.sub(r"\W|_|and", "", name.lower()): name for name in SUBJECTS}
    return spelled.get(re.sub(r"\W|_|and", "", subject.lower()))


INSTRUCTION = "Think step by step, then write the final answer in \\boxed{}."
SOURCES: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {"gsm8k": gsm8k, "math": math, "arithmetic": draw_sums}


class Gsm8k(SingleTurn):
    """Grade-school problems, whose answers are numbers. Evaluate on `split = "test"`."""

    def __init__(self, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        rewards, share = {"correct": Numeric(extract="boxed")}, demonstrate_mistakes
        super().__init__(
            bind_args(gsm8k, rows, caller=type(self)), _ask, rewards, gold=_write_solution, demonstrate_mistakes=share
        )


class Math(SingleTurn):
    """Competition problems, whose answers are numbers, expressions, sets, words: MATH by level and subject, or AIME."""

    def __init__(self, timeout: float = 5.0, demonstrate_mistakes: float = 0.0, **rows: Any) -> None:
        rewards, share = {"correct": Symbolic(timeout=timeout)}, demonstrate_mistakes
        super().__init__(
            bind_args(math, rows, caller=type(self)), _ask, rewards, gold=_write_solution, demonstrate_mistakes=share
        )


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
            return completion.answer if (completion := strict.parse(text)) else None

        def in_format(text: str, row: Mapping[str, Any]) -> float:
            return float(strict.parse(text) is not None)

        def words(text: str, row: Mapping[str, Any]) -> float:
            return float(len(completion.thinking.split())) if (completion := strict.parse(text)) else 0.0

        correct: Reward = Symbolic(extract=boxed) if data == "math" else Numeric(extract=boxed)
        super().__init__(
            bind_args(SOURCES[data], rows, caller=type(self))(),  # checks its arguments now, and yields rows lazily
            lambda row: f"{strict.instructions}\n\n{row['question']}",
            {"correct": correct, "format": scaled(in_format, format_reward)},
            metrics={"thinking_words": words},
            gold=lambda row: strict.write(row.get("solution", f"{row['question']}={row['answer']}"), row["answer"]),
            raw=True,
            demonstrate_mistakes=demonstrate_mistakes,
        )

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return self._tags


def _ask(row: dict[str, Any]) -> str:
    return f"{row['question']}\n\n{INSTRUCTION}"


def _write_solution(row: dict[str, Any]) -> str:
    boxed = f"\\boxed{{{row['answer']}}}"
    return f"{row['solution']}\n\n{boxed}" if "solution" in row else boxed
