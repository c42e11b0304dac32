"""How many training episodes are welcome: enough for every batch that could ship, judged by what they have yielded.

At level 0 they are started in waves, the next when all of one are in and credited: who is slow then decides nothing.
"""

from __future__ import annotations

import math


class Demand:
    """`in_waves` is level 0. What it knows of the past is a fold over the credited groups."""

    def __init__(self, *, in_waves: bool) -> None:
        self.in_waves = in_waves
        self._rollouts = self._episodes = 0
        self._wave = 0
        """Episodes that are still to be started before any of the wave counts."""

    def credited(self, rollouts: int, episodes: int) -> None:
        """A group of so many episodes had so many rollouts to credit: several agents may play in one."""
        self._rollouts += rollouts
        self._episodes += episodes

    def opened(self, episodes: int) -> None:
        self._wave -= episodes

    def begin_wave(self, rollouts: int) -> None:
        """Everything that was started is in and credited, and so many rollouts are missing."""
        self._wave = self.episodes(rollouts, 0)

    @property
    def rest_of_wave(self) -> int:
        return max(0, self._wave)

    def episodes(self, rollouts: int, in_processing: int) -> int:
        """How many it takes for so many rollouts, beside those of groups that are being credited."""
        return max(0, math.ceil(rollouts / self._rollouts_per_episode) - in_processing)

    @property
    def _rollouts_per_episode(self) -> float:
        """At least 1: episodes that failed are replaced, not foreseen."""
        return max(1.0, self._rollouts / self._episodes) if self._episodes else 1.0
