r"""MATH, by Hendrycks et al.: competition problems of seven subjects and five levels, whose answers are `\boxed{...}`.

The same rows go by several names in copies of it: `problem` or `question`, `type` or `subject`, a level as text or as a
number, with or without the answer in a column of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.data.rows import Row, located_rows
from headrace.environments.data.tables import DataError
from headrace.environments.rewards.answers import boxed_answer
from headrace.errors import BadInput

log = logging.getLogger(__name__)

NAME = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "Algebra",
    "Counting & Probability",
    "Geometry",
    "Intermediate Algebra",
    "Number Theory",
    "Prealgebra",
    "Precalculus",
)


def math(
    source: str | Path = NAME,
    split: str = "train",
    levels: Sequence[int] | None = None,
    subjects: Sequence[str] | None = None,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of `question`, `answer`, `solution`, `level` (None where it is not known) and `subject`.

    A problem whose solution boxes nothing (there are two among those for training) is left out, with a warning.
    """
    if subjects is not None and (isinstance(subjects, str) or not all(isinstance(one, str) for one in subjects)):
        raise BadInput(f'subjects: expected a list of names, as ["Algebra"], not {subjects!r:.60}')
    if levels is not None and not _are_levels(levels):
        raise BadInput(f"levels: expected a list of numbers from 1 to 5, as [4, 5], not {levels!r:.60}")
    wanted = None if subjects is None else {_subject(subject) for subject in subjects}
    rows = (_task(row) for row in _rows(source, split, wanted, columns))
    chosen = (
        row
        for row in rows
        if row and (levels is None or row["level"] in levels) and (wanted is None or row["subject"] in wanted)
    )
    yield from islice(chosen, limit)


def _rows(
    source: str | Path, split: str, subjects: set[str] | None, columns: Mapping[str, str] | None
) -> Iterator[Row]:
    if str(source) != NAME:
        yield from located_rows(source, split, None, columns)
        return
    for subject in SUBJECTS:  # on the hub each of them is a subset
        if subjects is None or subject in subjects:
            subset = re.sub(r"\W+", "_", subject.lower().replace("&", "and"))
            yield from located_rows(source, split, subset, columns)


def _task(row: Row) -> dict[str, Any] | None:
    solution = row.text("solution")
    answer = row.find("answer") or boxed_answer(solution)
    if answer is None:
        log.warning("%s: left out, since its solution boxes no answer", row.where)
        return None
    return {
        "question": row.text("question", "problem"),
        "answer": str(answer),
        "solution": solution,
        "level": _level(row.find("level"), row.where),
        "subject": _subject(row.text("subject", "type"), row.where),
    }


def _level(level: Any, where: str) -> int | None:
    digits = str(level).removeprefix("Level ").strip()
    if digits.isdecimal():
        return int(digits)
    if digits in ("?", "None"):
        return None
    raise DataError(f"{where}: the level is neither a number nor 'Level 1' to 'Level 5', but {level!r:.60}")


def _are_levels(levels: Any) -> bool:
    """As a run file gave them: of any type."""
    return isinstance(levels, Sequence) and all(isinstance(level, int) and 1 <= level <= 5 for level in levels)


def _subject(subject: str, where: str = "subjects") -> str:
    """As the data spells it; case, `_` and "and" do not matter."""
    spelled = {re.sub(r"\W|_|and", "", known.lower()): known for known in SUBJECTS}
    found = spelled.get(re.sub(r"\W|_|and", "", subject.lower()))
    if found is None:
        raise BadInput(f"{where}: no subject {subject!r}; there is {', '.join(SUBJECTS)}")
    return found
