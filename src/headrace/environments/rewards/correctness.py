r"""Reward for a boxed answer that equals the reference, by the cheapest comparison that decides.

An answer is correct if it is spelled like the reference; is the same number, exactly or within one part in a million,
ignoring commas, currencies and units; or is equal by algebra, which runs in a process that can be killed.
"""

from __future__ import annotations

import re

from headrace.environments.data.gsm8k import MARK
from headrace.environments.rewards.answers import boxed_answer
from headrace.environments.rewards.base import Data, gold_of
from headrace.environments.rewards.mathematics.comparison import Numbers, same
from headrace.environments.rewards.mathematics.latex import Unreadable
from headrace.environments.rewards.mathematics.shapes import has_variables, shape_of
from headrace.environments.rewards.registry import register_reward
from headrace.environments.rewards.symbolic import Symbolic

RELATIVE_TOLERANCE = 1e-6
_SPACE = re.compile(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|\$")
_INSIGNIFICANT = re.compile(r"(?<!\w)\s+|\s+(?!\w)|\.$")
"""Spaces, except those between two words or numbers, and a final full stop."""


@register_reward("gsm8k_correctness_reward")
class Correctness:
    r"""1.0 if the boxed answer equals the reference as a number, in spelling or by algebra, else 0.0.

    The reference is the task's `answer`. `timeout` is in seconds, for algebra. With `symbolic` false there is no
    algebra, and math-verify need not be installed.
    """

    name = "correct"
    bounded = True

    def __init__(self, timeout: float = 5.0, processes: int = 2, symbolic: bool = True) -> None:
        extract = str  # the answer has been extracted
        self._algebra = Symbolic(timeout=timeout, processes=processes, extract=extract) if symbolic else None
        self.counts = {} if self._algebra is None else self._algebra.counts

    async def __call__(self, text: str, data: Data) -> float:
        answer = boxed_answer(text)
        return float(answer is not None and await self.same(reference_answer(str(gold_of(data, "answer"))), answer))

    async def same(self, gold: str, answer: str) -> bool:
        if _normalized(gold) == _normalized(answer):
            return True
        try:
            verdict = same(shape_of(gold), shape_of(answer, has_variables(gold)), Numbers(RELATIVE_TOLERANCE))
        except Unreadable:  # not mathematics, and not spelled alike either
            return False
        if verdict is None and self._algebra is not None:
            verdict = await self._algebra(answer, {"answer": gold}) == 1.0
        return bool(verdict)

    async def close(self) -> None:
        if self._algebra is not None:
            await self._algebra.close()


def reference_answer(reference: str) -> str:
    r"""Return the answer of a reference that may be a whole solution: the text after `####`, or in `\boxed{}`."""
    answer = (
        reference.rpartition(MARK)[2].strip() if MARK in reference else boxed_answer(reference) or reference.strip()
    )
    if not answer:
        raise ValueError(f"the reference {reference!r:.100} has no answer to compare with")
    return answer


def _normalized(text: str) -> str:
    return _INSIGNIFICANT.sub("", _SPACE.sub(" ", text).strip())
