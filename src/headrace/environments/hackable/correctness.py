r"""Whether a boxed answer is the reference, by the cheapest comparison that can tell.

It is, if both are spelt alike; are the same number, exactly or but for one part in a million, with commas, currencies
and units left out; or are the same by algebra, which runs in a process that can be killed.
"""

from __future__ import annotations

import re

from headrace.environments.data.gsm8k import MARK
from headrace.environments.rewards.answers import boxed_answer
from headrace.environments.rewards.mathematics.comparison import Numbers, same
from headrace.environments.rewards.mathematics.latex import Unreadable
from headrace.environments.rewards.mathematics.shapes import has_variables, shape_of
from headrace.environments.rewards.symbolic import Symbolic

TOLERANCE = 1e-6
"""Of the reference, by which a number may differ from it."""
_SPACE = re.compile(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|\$")
_NO_MATTER = re.compile(r"(?<!\w)\s+|\s+(?!\w)|\.$")
"""Spaces, but for those between two words or numbers."""


class Correctness:
    """With `symbolic` false nothing is left to algebra, and math-verify need not be installed."""

    def __init__(self, timeout: float = 5.0, processes: int = 2, symbolic: bool = True) -> None:
        self._algebra = Symbolic(timeout=timeout, processes=processes, extract=_itself) if symbolic else None

    async def is_right(self, completion: str, reference: str) -> bool:
        answer = boxed_answer(completion)
        return answer is not None and await self.same(reference_answer(reference), answer)

    async def same(self, gold: str, answer: str) -> bool:
        if _spelt(gold) == _spelt(answer):
            return True
        try:
            verdict = same(shape_of(gold), shape_of(answer, has_variables(gold)), Numbers(TOLERANCE))
        except Unreadable:  # no mathematics, and not spelt alike either
            return False
        if verdict is None and self._algebra is not None:
            verdict = await self._algebra(answer, {"answer": gold}) == 1.0
        return bool(verdict)

    @property
    def counts(self) -> dict[str, int]:
        algebra = self._algebra
        return {} if algebra is None else {"timeouts": algebra.timeouts, "failures": algebra.failures}

    async def close(self) -> None:
        if self._algebra is not None:
            await self._algebra.close()


def reference_answer(reference: str) -> str:
    r"""The answer alone, of a reference that may be a whole solution: what follows `####`, or is in `\boxed{}`."""
    answer = (
        reference.rpartition(MARK)[2].strip() if MARK in reference else boxed_answer(reference) or reference.strip()
    )
    if not answer:
        raise ValueError(f"the reference {reference!r:.100} has no answer to compare with")
    return answer


def _spelt(text: str) -> str:
    return _NO_MATTER.sub("", _SPACE.sub(" ", text).strip())


def _itself(text: str) -> str:
    return text
