"""An algorithm that keeps a state, as it was: every group finds the state that it was credited with.

For saved rollouts, which come step by step, and not in the order in which they were credited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.algorithms.base import Algorithm, Host, RolloutView, Survivor, Tally


class Recalled(Algorithm):
    """`states` are by draw; a group that was not credited in the end finds the state of the group before it."""

    def __init__(self, algorithm: Algorithm, states: Mapping[int, Any]) -> None:
        self._algorithm = algorithm
        self._states = states

    @property
    def host(self) -> Host:  # type: ignore[override]
        return self._algorithm.host

    @property
    def action_loss_type(self) -> Literal["rl", "ce", "ref_kl"]:  # type: ignore[override]
        return self._algorithm.action_loss_type

    @property
    def tally(self) -> Tally:
        return self._algorithm.tally

    async def score_rollout(self, rollout: RolloutView) -> None:
        await self._algorithm.score_rollout(rollout)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        draw = group[0].rollout.draw_id
        if draw in self._states:
            self._algorithm.load_state(self._states[draw])
        await self._algorithm.score_group(group)

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await self._algorithm.score_batch(batch)
