"""GSM8K: grade-school problems whose answers are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.data.rows import located_rows
from headrace.environments.data.tables import DataError

NAME = "openai/gsm8k"
MARK = "####"


def gsm8k(
    source: str | Path = NAME,
    split: str = "train",
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of `question`, `answer` (the number after `####`, without commas) and `solution` (all of it)."""
    subset = "main" if str(source) == NAME else None
    for row in islice(located_rows(source, split, subset, columns), limit):
        solution = row.text("answer")
        _, mark, answer = solution.rpartition(MARK)
        if not mark or not answer.strip():
            raise DataError(f"{row.where}: no answer follows {MARK} in {solution[-60:]!r}")
        yield {"question": row.text("question"), "answer": answer.strip().replace(",", ""), "solution": solution}
