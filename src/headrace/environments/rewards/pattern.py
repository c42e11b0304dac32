"""Reward for an answer that matches a regular expression.

Matching runs in a sandbox: an expression with nested repetition can take exponential time on a text that almost
matches, and `re` holds the interpreter meanwhile.
"""

from __future__ import annotations

import re

from headrace.environments.rewards.base import Counts, Data, SandboxReward, gold_of
from headrace.environments.rewards.registry import register_with_part
from headrace.errors import BadInput


@register_with_part("regex_reward")
class Pattern(SandboxReward):
    """1.0 if the pattern is found in the text, or with `full` matches all of it, else 0.0.

    With `field`, group 1 of the first match (the whole match, if the pattern has no group) must also equal that field
    of the task. A text that takes longer than `timeout` seconds of processor time does not match.
    """

    name = "pattern"

    def __init__(
        self, pattern: str, field: str | None = None, full: bool = False, timeout: float = 1.0, processes: int = 2
    ) -> None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(f"not a regular expression: {error}", key="pattern", value=pattern) from error
        super().__init__(timeout, processes, Counts(self.name, timeouts="answers that took too long to match"))
        self._pattern = pattern
        self._field = field
        self._full = full

    async def __call__(self, text: str, data: Data) -> float:
        gold = None if self._field is None else str(gold_of(data, self._field))
        return float(await self._check(f"{__name__}:matches", self._pattern, text, self._full, gold) or 0)


def matches(pattern: str, text: str, full: bool, gold: str | None) -> bool:
    """Return whether the pattern matches; runs in the sandbox."""
    expression = re.compile(pattern)
    match = expression.fullmatch(text) if full else expression.search(text)
    return match is not None and (gold is None or match[min(1, expression.groups)] == gold)
