"""Hierarchical GRPO: a rollout's credit is its reward minus the mean reward of its peers, itself among them.

    A_i = r_i - mean(r of its peers)

Peers are the rollouts of the same agent in the group. For the agents in `episode_agents` they are those of the same
episode: for example solvers of one problem, where every episode of the group has its own problem.

A rollout without other peers has a credit of 0, and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, assign
from headrace.config.algorithms import ALGORITHMS, FINAL, AdvantageConfig, Promises
from headrace.rollout.credit import baseline, center

log = logging.getLogger(__name__)


@ALGORITHMS.register
class HierarchicalGrpoConfig(AdvantageConfig):
    """Reward minus the mean of the peers: rollouts of the same agent, in the group or in the episode."""

    CREDIT = "`r_i - mean(r of its peers)`: the same agent, in the group or in the episode"
    COMPARES = True

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: list[str] = Field(default_factory=list)
    """Agents whose peers are those of their own episode; the peers of others are in the whole group."""

    def make(self, context: MakeContext) -> HierarchicalGrpo:
        return HierarchicalGrpo(self.episode_agents)

    def promises(self, algorithm: Algorithm) -> Promises:
        return Promises(frozenset({"shift", "zero_sum", "order"}), {"signs": FINAL})


class HierarchicalGrpo(Algorithm):
    def __init__(self, episode_agents: Collection[str] = ()) -> None:
        self._episode_agents = frozenset(episode_agents)
        self._unseen = set(episode_agents)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        present = {rollout.agent for rollout in group}
        for name in sorted(self._unseen - present):
            agents = ", ".join(sorted(present))
            log.warning("hierarchical_grpo: episode_agents has %r, and the first group is of %s", name, agents)
        self._unseen = set()  # warned about once, with the first group
        self.tally.count("without_peers", sum(len(members) == 1 for members in self._peers(group)))
        assign(group, self.credit_terms(group)[0].values)

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        rewards = np.array([rollout.reward for rollout in group])
        means, values = np.zeros(len(group)), np.zeros(len(group))
        for members in self._peers(group):
            means[members], values[members] = baseline(rewards[members]), center(rewards[members])
        return [CreditTerm("reward", rewards, means, values, "reward - mean(reward of its peers)", "episode_agents")]

    def _peers(self, group: Sequence[RolloutView]) -> list[list[int]]:
        """Return lists of indices of the rollouts that are compared with each other."""
        peers: dict[tuple[str, int | None], list[int]] = {}
        for index, rollout in enumerate(group):
            episode = rollout.episode if rollout.agent in self._episode_agents else None
            peers.setdefault((rollout.agent, episode), []).append(index)
        return list(peers.values())
