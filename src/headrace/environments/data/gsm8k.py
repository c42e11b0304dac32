"""GSM8K: grade-school problems whose answers are numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.data.rows import located_rows

NAME = "openai/gsm8k"
MARK = "####"
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def gsm8k(
    source: str | Path = NAME,
    split: str = "train",
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows of `question`, `answer` (the number after `####`, without commas) and `solution` (the steps before).

    Calculator annotations in the solutions, `<<2*3=6>>`, are left out.
    """
    subset = "main" if str(source) == NAME else None
    for row in islice(located_rows(source, split, subset, columns), limit):
        worked = row.text("answer")
        steps, mark, answer = worked.rpartition(MARK)
        if not mark or not answer.strip():
            raise row.error(f"no answer follows {MARK} in {worked[-60:]!r}", key="answer")
        yield {
            "question": row.text("question"),
            "answer": answer.strip().replace(",", ""),
            "solution": _CALCULATOR.sub("", steps).strip(),
        }
