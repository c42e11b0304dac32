"""The answer has the form that a regular expression describes.

Matching runs in a sandbox: an expression with nested repetition can take for ever over a text that almost fits, and
`re` lets nothing else run meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.environments.rewards.base import gold_of, warn_of_count
from headrace.environments.sandbox import PATIENCE, CallTimeout, Sandbox
from headrace.errors import BadInput


class Pattern:
    """1.0 if the pattern is found in the text, or with `full` describes all of it, else 0.0.

    With `field`, what the first match has in group 1 (all of the match, if the pattern has no group) must also be what
    the task has there. A text that takes longer than `timeout` seconds of the processor's time does not match;
    `timeouts` counts those.
    """

    name = "pattern"
    bounded = True

    def __init__(
        self, pattern: str, field: str | None = None, full: bool = False, timeout: float = 1.0, processes: int = 2
    ) -> None:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(f"not a regular expression: {error}", key="pattern", value=pattern) from error
        self.timeouts = 0
        self._pattern = pattern
        self._field = field
        self._full = full
        self._timeout = timeout
        self._sandbox = Sandbox(processes)

    async def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        gold = None if self._field is None else str(gold_of(data, self._field))
        call = f"{__name__}:matches", self._pattern, text, self._full, gold
        try:
            return float(await self._sandbox.call(*call, timeout=self._timeout, patience=PATIENCE))
        except CallTimeout:
            self.timeouts += 1
            warn_of_count(self.name, "answers that took too long to match", self.timeouts)
            return 0.0

    async def close(self) -> None:
        await self._sandbox.close()


def matches(pattern: str, text: str, full: bool, gold: str | None) -> bool:
    """What runs in the sandbox."""
    expression = re.compile(pattern)
    match = expression.fullmatch(text) if full else expression.search(text)
    return match is not None and (gold is None or match[min(1, expression.groups)] == gold)
