"""Reward for an answer that is mathematically equal to the gold answer: as a number, in spelling, or by algebra.

Algebra may take unbounded time on generated text, so it runs in processes that can be killed.
"""

from __future__ import annotations

from headrace.environments.rewards.answers import Extract, extract_named
from headrace.environments.rewards.base import Counts, Data, SandboxReward, check_installed
from headrace.environments.rewards.mathematics.comparison import Numbers, same
from headrace.environments.rewards.mathematics.shapes import has_variables
from headrace.environments.rewards.numeric import shape_of_answer, shape_of_gold
from headrace.environments.rewards.registry import register_with_part

ALGEBRA = "headrace.environments.rewards.mathematics.algebra:same_answer"


@register_with_part("math_verify_reward")
class Symbolic(SandboxReward):
    """1.0 if the answer is mathematically equal to the task's `field`, else 0.0.

    A comparison that takes longer than `timeout` seconds, or fails, counts against the answer. `extract` finds the
    answer in the text, as for `Numeric`.
    """

    name = "symbolic"

    def __init__(
        self,
        field: str = "answer",
        timeout: float = 5.0,
        processes: int = 2,
        extract: str | Extract = "boxed",
    ) -> None:
        check_installed(self.name, "math_verify", "math")
        too_long, failed = "answers that took too long to compare", "answers whose comparison failed"
        super().__init__(timeout, processes, Counts(self.name, timeouts=too_long, failures=failed))
        self._field = field
        self._extract = extract_named(extract)
        self._works = False

    async def __call__(self, text: str, data: Data) -> float:
        gold = shape_of_gold(data, self._field)
        extracted = self._extract(text)
        answer = shape_of_answer(extracted, has_variables(str(data[self._field])))
        if answer is None:
            return 0.0
        verdict = same(gold, answer, Numbers())
        if verdict is None:
            if not self._works:  # else a broken installation would look like wrong answers
                await self._sandbox.call(ALGEBRA, "x+x", "2x", timeout=60.0)
                self._works = True
            verdict = await self._check(ALGEBRA, str(data[self._field]), str(extracted))
        return float(bool(verdict))
