"""Reward for an answer that equals the gold answer letter by letter."""

from __future__ import annotations

from headrace.environments.rewards.base import Data, gold_of
from headrace.environments.rewards.registry import register_with_part


@register_with_part("exact_match_reward")
class Exact:
    """1.0 if the text equals the task's `field`, else 0.0. A gold answer that is not a text is converted to one."""

    name = "exact"
    bounded = True

    def __init__(self, field: str = "answer", ignore_case: bool = False, strip: bool = True) -> None:
        self._field = field
        self._ignore_case = ignore_case
        self._strip = strip

    def __call__(self, text: str, data: Data) -> float:
        gold = str(gold_of(data, self._field))
        if self._strip:
            text, gold = text.strip(), gold.strip()
        if self._ignore_case and len(text) <= 3 * len(gold):  # a letter folds into three at most
            text, gold = text.casefold(), gold.casefold()
        return float(text == gold)
