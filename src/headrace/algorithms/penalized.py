"""Another algorithm's credit, and a length penalty on top: what if it had one?

    A = credit of the algorithm + center(-p)        p as in `headrace.algorithms.length_penalty`, over the plain mean

A run takes penalties where they are part of the credit (`group_credit`); for all others this is a question that saved
rollouts can answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.algorithms.base import Algorithm, Host, RolloutView, Survivor, Tally
from headrace.algorithms.length_penalty import LengthPenalty
from headrace.rollout.cohort import Cohort
from headrace.rollout.credit import center


class Penalized(Algorithm):
    def __init__(self, algorithm: Algorithm, penalty: LengthPenalty) -> None:
        self._algorithm = algorithm
        self._penalty = penalty

    @property
    def host(self) -> Host:  # type: ignore[override]
        return self._algorithm.host

    @property
    def tally(self) -> Tally:
        return self._algorithm.tally

    async def setup(self) -> None:
        await self._algorithm.setup()

    async def close(self) -> None:
        await self._algorithm.close()

    async def score_rollout(self, rollout: RolloutView) -> None:
        await self._algorithm.score_rollout(rollout)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        await self._algorithm.score_group(group)
        term = self._penalty(Cohort.of([view.rollout for view in group]), self.tally)
        for view, bonus in zip(group, center(term), strict=True):
            for sample in view.samples:
                if "advantages" not in sample.streams:
                    raise ValueError("it gives no advantages that a length penalty could be added to")
                credit = sample.streams["advantages"].astype(np.float64)
                credit[sample.prompt_length :] += bonus
                sample.set_stream("advantages", credit)

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await self._algorithm.score_batch(batch)

    def state(self) -> Any:
        return self._algorithm.state()
