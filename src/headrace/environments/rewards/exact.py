"""The answer is the gold answer, letter by letter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.environments.rewards.base import gold_of


class Exact:
    """1.0 if the text is what the task has under `field`, else 0.0. A gold answer that is no text is written as one."""

    name = "exact"

    def __init__(self, field: str = "answer", ignore_case: bool = False, strip: bool = True) -> None:
        self._field = field
        self._ignore_case = ignore_case
        self._strip = strip

    def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        gold = str(gold_of(data, self._field))
        if self._strip:
            text, gold = text.strip(), gold.strip()
        if self._ignore_case and len(text) <= 3 * len(gold):  # a letter folds into three at most
            text, gold = text.casefold(), gold.casefold()
        return float(text == gold)
