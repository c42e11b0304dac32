"""RAE, role-conditioned advantage estimation (arXiv 2506.24119): each agent has a running baseline of its own.

    A_i = r_i - b_agent,   then   b_agent <- decay * b_agent + (1 - decay) * r_i,   b = 0 at first

In self-play one policy plays all sides of a game, and one side may be favoured: with one baseline per agent, this does
not enter the credit. Rollouts of a group are taken episode by episode, those of an episode in the order in which the
environment returned them. Baselines are committed with the credit that changed them: a killed run restores them.

Left out on purpose: any comparison within the group, so that a group of one works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, assign
from headrace.config.algorithms import ALGORITHMS, FINAL, AdvantageConfig, Promises


@ALGORITHMS.register
class RaeConfig(AdvantageConfig):
    """Reward minus a running average of what this agent has earned so far."""

    CREDIT = "`r_i - b`, where `b` is a running average of what its agent has earned (arXiv 2506.24119)"

    type: Literal["rae"] = "rae"
    decay: float = Field(0.95, ge=0, lt=1)
    """How much of an agent's baseline is left after each of its rollouts."""

    def make(self, context: MakeContext) -> Rae:
        return Rae(self.decay)

    def promises(self, algorithm: Algorithm) -> Promises:
        before = "credit is measured from what was earned before"
        return Promises(reasons={"shift": before, "zero_sum": before, "signs": FINAL}, reward_alone=False)


class Rae(Algorithm):
    replayable = True

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = decay
        self._baselines: dict[str, float] = {}

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        before, self._baselines = self._running_baselines(group)
        assign(group, np.array([rollout.reward for rollout in group]) - before)
        for rollout, baseline in zip(group, before, strict=True):
            self.tally.mean(f"baseline/{rollout.agent}", float(baseline), 1)

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        rewards, before = np.array([rollout.reward for rollout in group]), self._running_baselines(group)[0]
        return [CreditTerm("reward", rewards, before, rewards - before, "reward - running mean of its agent", "decay")]

    def _running_baselines(self, group: Sequence[RolloutView]) -> tuple[np.ndarray, dict[str, float]]:
        """Return the baseline before each rollout, and the baselines of all agents after the group."""
        before, baselines = np.zeros(len(group)), dict(self._baselines)
        for index in sorted(range(len(group)), key=lambda index: group[index].episode):
            agent, reward = group[index].agent, group[index].reward
            before[index] = baselines.get(agent, 0.0)
            baselines[agent] = self._decay * float(before[index]) + (1 - self._decay) * reward
        return before, baselines

    def state(self) -> dict[str, float]:
        return dict(self._baselines)

    def load_state(self, state: dict[str, float]) -> None:
        self._baselines = dict(state)
