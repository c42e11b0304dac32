"""On-policy distillation: on what the policy itself sampled, towards a frozen teacher.

    ref_t = log p_teacher(token_t | all before it)        KL(policy || teacher), estimated on the policy's own tokens

The teacher sees the sample's own tokens, verbatim, at the temperature that they were sampled at. Rewards are logged and
never read. A rollout that the teacher did not score has nothing to learn from, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.algorithms.base import Algorithm, Survivor
from headrace.algorithms.distillation import distil
from headrace.algorithms.scoring import Scorer, open_scorer
from headrace.inference.client.reference import Reference


class Opd(Algorithm):
    action_loss_type = "ref_kl"
    model_role = "teacher"

    def __init__(self, teacher: Reference, max_concurrent: int = 32) -> None:
        self._teacher = teacher
        self._max_concurrent = max_concurrent
        self._scorer: Scorer

    async def setup(self) -> None:
        self._scorer = await open_scorer(self._teacher, self.host, self._max_concurrent)

    async def close(self) -> None:
        await self._teacher.close()

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        no_hints: list[list[int]] = [[] for _ in batch]
        await distil(batch, no_hints, self._scorer, self.tally)
