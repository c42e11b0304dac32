r"""The answer is the gold one as mathematics: numbers and spelling decide what they can, algebra the rest.

Algebra can take for ever over what a model makes up, so it runs in processes that can be killed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from headrace.environments.rewards.answers import Extract, extract_named
from headrace.environments.rewards.base import warn_of_count
from headrace.environments.rewards.mathematics.comparison import Numbers, same
from headrace.environments.rewards.mathematics.shapes import has_variables
from headrace.environments.rewards.numeric import shape_of_answer, shape_of_gold
from headrace.environments.sandbox import PATIENCE, CallFailed, CallTimeout, Sandbox
from headrace.errors import BadInput

ALGEBRA = "headrace.environments.rewards.mathematics.algebra:same_answer"


class Symbolic:
    """1.0 if the answer is what the task has under `field`, else 0.0.

    A comparison that takes longer than `timeout` seconds, or breaks down, counts against the answer; `timeouts` and
    `failures` tell how many did. `extract` says where the answer stands, as for `Numeric`.
    """

    name = "symbolic"
    bounded = True

    def __init__(
        self,
        field: str = "answer",
        timeout: float = 5.0,
        processes: int = 2,
        extract: str | Extract = "boxed",
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            fix = "Run pip install 'headrace[math]'."
            raise BadInput("the library math-verify is not installed", key="reward", value=self.name, fix=fix)
        self.timeouts = 0
        self.failures = 0
        self._field = field
        self._timeout = timeout
        self._extract = extract_named(extract)
        self._sandbox = Sandbox(processes)
        self._works = False

    async def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        gold = shape_of_gold(data, self._field)
        extracted = self._extract(text)
        answer = shape_of_answer(extracted, has_variables(str(data[self._field])))
        if answer is None:
            return 0.0
        verdict = same(gold, answer, Numbers())
        if verdict is None:
            verdict = await self._same_by_algebra(str(data[self._field]), str(extracted))
        return float(verdict)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _same_by_algebra(self, gold: str, answer: str) -> bool:
        if not self._works:  # else a broken installation would look like wrong answers
            await self._sandbox.call(ALGEBRA, "x+x", "2x", timeout=60.0)
            self._works = True
        try:
            return bool(await self._sandbox.call(ALGEBRA, gold, answer, timeout=self._timeout, patience=PATIENCE))
        except CallTimeout:
            self.timeouts += 1
            warn_of_count(self.name, "answers that took too long to compare", self.timeouts)
        except CallFailed as error:
            if error.kind in ("start", "closed"):  # no fault of the answer
                raise
            self.failures += 1
            warn_of_count(self.name, "answers whose comparison broke down", self.failures)
        return False
