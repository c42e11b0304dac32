r"""Rewards for mathematical answers: `Numeric`, `Symbolic`, and `Correctness` for references that are whole solutions.

An answer is compared as a number and in spelling first. Algebra decides about the rest: it may take unbounded time on
generated text, so it runs in processes that can be killed.
"""

from __future__ import annotations

import re

from headrace.environments.rewards.answers import FINAL_ANSWER_MARK, Extract, boxed_answer, find_extract
from headrace.environments.rewards.base import (
    Counts,
    Data,
    SandboxReward,
    check_installed,
    gold_of,
    register_reward,
    register_with_part,
)
from headrace.environments.rewards.mathematics.comparison import NumberComparer, compare, is_number
from headrace.environments.rewards.mathematics.latex import Unreadable
from headrace.environments.rewards.mathematics.shapes import Shape, has_variables, parse_shape

ALGEBRA = "headrace.environments.rewards.mathematics.algebra:same_answer"
RELATIVE_TOLERANCE = 1e-6
_SPACE = re.compile(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|\$")
_INSIGNIFICANT = re.compile(r"(?<!\w)\s+|\s+(?!\w)|\.$")
"""Spaces, except those between two words or numbers, and a final full stop."""


@register_with_part("numeric_reward")
class Numeric:
    r"""1.0 if the answer is the number in the task's `field`, else 0.0.

    Commas, currency, units and the form do not matter: `$1,234.50`, `18 dollars`, `3\frac{1}{2}` and `1e3` are numbers.
    The numbers must be equal; a decimal may be rounded past its sixth digit. `tolerance` is an allowed relative error.
    `extract` finds the answer in the text: `final`, `boxed`, `last_number`, `all`, or a function.
    """

    name = "numeric"
    bounded = True

    def __init__(self, field: str = "answer", tolerance: float | None = None, extract: str | Extract = "final") -> None:
        self._field = field
        self._comparer = NumberComparer(tolerance)
        self._extract = find_extract(extract)

    def __call__(self, text: str, data: Data) -> float:
        gold = _parse_gold(data, self._field)
        if not is_number(gold):
            raise ValueError(f"{self._field} = {data[self._field]!r:.100}: the task's gold answer is not a number")
        answer = _parse_answer(self._extract(text), variables=False)
        return float(answer is not None and compare(gold, answer, self._comparer) is True)


@register_with_part("math_verify_reward")
class Symbolic(SandboxReward):
    """1.0 if the answer is mathematically equal to the task's `field`, else 0.0.

    A comparison that takes longer than `timeout` seconds, or fails, counts against the answer. `extract` finds the
    answer in the text, as for `Numeric`.
    """

    name = "symbolic"

    def __init__(
        self, field: str = "answer", timeout: float = 5.0, processes: int = 2, extract: str | Extract = "boxed"
    ) -> None:
        check_installed(self.name, "math_verify", "math")
        too_long, failed = "answers that took too long to compare", "answers whose comparison failed"
        super().__init__(timeout, processes, Counts(self.name, timeouts=too_long, failures=failed))
        self._field = field
        self._extract = find_extract(extract)
        self._works = False

    async def __call__(self, text: str, data: Data) -> float:
        gold = _parse_gold(data, self._field)
        extracted = self._extract(text)
        answer = _parse_answer(extracted, has_variables(str(data[self._field])))
        if answer is None:
            return 0.0
        verdict = compare(gold, answer, NumberComparer())
        if verdict is None:
            if not self._works:  # else a broken installation would look like wrong answers
                await self._sandbox.call(ALGEBRA, "x+x", "2x", timeout=60.0)
                self._works = True
            verdict = await self._check(ALGEBRA, str(data[self._field]), str(extracted))
        return float(bool(verdict))


@register_reward("gsm8k_correctness_reward")
class Correctness:
    r"""1.0 if the boxed answer equals the reference as a number, in spelling or by algebra, else 0.0.

    The reference is the task's `answer`. Numbers may differ by one part in a million. `timeout` is in seconds, for
    algebra. With `symbolic` false there is no algebra, and math-verify need not be installed.
    """

    name = "correct"
    bounded = True

    def __init__(self, timeout: float = 5.0, processes: int = 2, symbolic: bool = True) -> None:
        # `str` extracts nothing: the answer has been extracted.
        self._algebra = Symbolic(timeout=timeout, processes=processes, extract=str) if symbolic else None
        self.counts = {} if self._algebra is None else self._algebra.counts

    async def __call__(self, text: str, data: Data) -> float:
        answer = boxed_answer(text)
        if answer is None:
            return 0.0
        return float(await self.is_correct(reference_answer(str(gold_of(data, "answer"))), answer))

    async def is_correct(self, gold: str, answer: str) -> bool:
        if _normalize(gold) == _normalize(answer):
            return True
        try:
            shapes = parse_shape(gold), parse_shape(answer, has_variables(gold))
            verdict = compare(*shapes, NumberComparer(RELATIVE_TOLERANCE))
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
    _, mark, last = reference.rpartition(FINAL_ANSWER_MARK)
    answer = last.strip() if mark else boxed_answer(reference) or reference.strip()
    if not answer:
        raise ValueError(f"the reference {reference!r:.100} has no answer to compare with")
    return answer


def _normalize(text: str) -> str:
    return _INSIGNIFICANT.sub("", _SPACE.sub(" ", text).strip())


def _parse_gold(data: Data, field: str) -> Shape:
    """Return the parsed gold answer. Raises `ValueError` for one that nothing can be compared with."""
    gold = gold_of(data, field)
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise ValueError(f"{field} = {gold!r:.100}: the task's gold answer is neither a text nor a number")
    try:
        return parse_shape(str(gold))
    except Unreadable as error:
        raise ValueError(f"{field} = {gold!r:.100}: the task's gold answer cannot be parsed: {error}") from error


def _parse_answer(answer: str | None, variables: bool) -> Shape | None:
    """Return the parsed answer, or None if it cannot be parsed. Without `variables` letters are units and words."""
    try:
        return None if answer is None else parse_shape(answer, variables)
    except Unreadable:
        return None
