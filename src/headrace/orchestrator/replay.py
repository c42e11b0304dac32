"""An algorithm's state over again, from what the journal has of every credit: agents, rewards, and their order.

For algorithms that learn from nothing else (`Algorithm.replayable`). So an audit can tell whether a state is the one
that its credits come to, and a rescoring can give each group the state that it was credited with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.rollout.types import Rollout, Sample, Task
from headrace.transport.journal import Journal


async def replayed_state(journal: Journal, env: str, algorithm: Algorithm) -> Any:
    """The state that a fresh algorithm is in after every credit that the journal has for its environment."""
    for credited, rewards in journal.credits():
        if credited == env:
            await _credit(algorithm, env, rewards)
    return algorithm.state()


async def states_before(journal: Journal, env: str, algorithm: Algorithm) -> dict[int, Any]:
    """By draw, the state that a fresh algorithm is in when its group comes to be credited."""
    states = {}
    for draw, (credited, rewards) in zip(journal.credited_draws(), journal.credits(), strict=True):
        if credited == env:
            states[draw] = _copied(algorithm.state())
            await _credit(algorithm, env, rewards)
    return states


async def state_problems(journal: Journal, algorithms: Mapping[str, Algorithm]) -> list[str]:
    """A sentence for every environment whose state is not what its credits come to; `algorithms` are fresh ones."""
    found = []
    for env, saved in journal.algorithm_states().items():
        if env in algorithms:
            expected = _copied(await replayed_state(journal, env, algorithms[env]))
            if msgspec.json.decode(saved.json) != expected:
                found.append(
                    f"the algorithm of {env} has the state {saved.json.decode()}, but its credits come to {expected}: "
                    "unless its settings were changed on the way, something is lost"
                )
    return found


async def _credit(algorithm: Algorithm, env: str, rewards: Sequence[tuple[str, float]]) -> None:
    task = Task(env, {})
    await algorithm.score_group([RolloutView(_as_credited(agent, reward), task) for agent, reward in rewards])


def _as_credited(agent: str, reward: float) -> Rollout:
    one = np.ones(1)
    return Rollout(agent=agent, reward=reward, samples=[Sample(one, one, one, one, 0)])


def _copied(state: Any) -> Any:
    """As it would come back from the journal."""
    return msgspec.json.decode(msgspec.json.encode(state))
