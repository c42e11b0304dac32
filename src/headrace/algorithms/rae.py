"""RAE, role-conditioned advantage estimation (arXiv 2506.24119): each agent has a running baseline of its own.

    A_i = r_i - b_agent,   then   b_agent <- decay * b_agent + (1 - decay) * r_i,   b = 0 at first

In self-play one policy sits on all sides of a game, and a side may be worth more than another: with a baseline each, no
side learns that it is the lucky one. Rollouts of a group are taken episode by episode, those of an episode in the order
in which its environment returned them. The baselines are committed with the credit that moved them, so that a run that
was killed goes on from them.

Left out on purpose: any comparison within the group, so that a group of one will do.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.algorithms.base import Algorithm, RolloutView


class Rae(Algorithm):
    replayable = True

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = decay
        self._baselines: dict[str, float] = {}

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout in sorted(group, key=lambda rollout: rollout.episode):
            before = self._baselines.get(rollout.agent, 0.0)
            rollout.assign_advantages(rollout.reward - before)
            self._baselines[rollout.agent] = self._decay * before + (1 - self._decay) * rollout.reward
            self.tally.mean(f"baseline/{rollout.agent}", before, 1)

    def state(self) -> dict[str, float]:
        return dict(self._baselines)

    def load_state(self, state: dict[str, float]) -> None:
        self._baselines = dict(state)
