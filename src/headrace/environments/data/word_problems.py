r"""GSM8K and MATH: word problems whose answers are numbers, or `\boxed{...}`.

GSM8K has grade-school problems. MATH, by Hendrycks et al., has competition problems of seven subjects and five levels.
Copies of it have different columns: `problem` or `question`, `type` or `subject`, a level as text or as a number, with
or without a column for the answer. AIME has neither subject nor level, and whole numbers as answers, often without a
solution: `problem`, `answer`, and perhaps `id` and `year`, in lower or upper case.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.arguments import BadArgument
from headrace.environments.data.tables import Row, located_rows
from headrace.environments.rewards.answers import FINAL_ANSWER_MARK, boxed_answer

log = logging.getLogger(__name__)

GSM8K = "openai/gsm8k"
MATH = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)
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
    for row in islice(located_rows(source, split, subset, columns), limit):
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
    wanted = None if subjects is None else {_spelled(subject) for subject in subjects}
    for subject in subjects or ():
        if _spelled(subject) is None:
            fix = f"Subjects: {', '.join(SUBJECTS)}."
            raise BadArgument("unknown subject", key="subjects", value=subject, fix=fix)
    filters = [key for key, values in (("levels", levels), ("subjects", subjects)) if values is not None]
    rows = (_task(row, filters) for row in _rows(source, split, wanted, columns))
    chosen = (
        row
        for row in rows
        if row and (levels is None or row["level"] in levels) and (wanted is None or row["subject"] in wanted)
    )
    yield from islice(chosen, limit)


def _rows(
    source: str | Path, split: str, subjects: set[str | None] | None, columns: Mapping[str, str] | None
) -> Iterator[Row]:
    if str(source) != MATH:
        yield from located_rows(source, split, None, columns)
        return
    for subject in SUBJECTS:  # on the hub each of them is a subset
        if subjects is None or subject in subjects:
            subset = re.sub(r"\W+", "_", subject.lower().replace("&", "and"))
            yield from located_rows(source, split, subset, columns)


def _task(row: Row, filters: Sequence[str]) -> dict[str, Any] | None:
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
    if (subject := _spelled(name)) is None:
        raise row.error("unknown subject", key="subject", value=name, fix=f"Subjects: {', '.join(SUBJECTS)}.")
    return {**task, "level": _level(row), "subject": subject}


def _level(row: Row) -> int | None:
    level = row.find("level")
    digits = str(level).removeprefix("Level ").strip()
    if digits.isdecimal():
        return int(digits)
    if digits in ("?", "None"):
        return None
    raise row.error("expected a number or 'Level 1' to 'Level 5'", key="level", value=level)


def _spelled(subject: str) -> str | None:
    """Return a subject as the data spells it; case, `_` and "and" do not matter."""
    spelled = {re.sub(r"\W|_|and", "", known.lower()): known for known in SUBJECTS}
    return spelled.get(re.sub(r"\W|_|and", "", subject.lower()))
