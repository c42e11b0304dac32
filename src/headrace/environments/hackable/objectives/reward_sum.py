"""The objective `reward_sum`: the weighted sum of the rewards that the run file lists, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.environments.arguments import BadArgument
from headrace.environments.hackable.registry import Objective, register_objective
from headrace.environments.hackable.samples import TrainingSample


@register_objective("reward_sum")
class RewardSum(Objective):
    """The sum of `rewards`, each times its number in `weights` (1.0 where unset)."""

    def __init__(self, rewards: Sequence[str], weights: Sequence[float] | None = None) -> None:
        if isinstance(rewards, str) or not rewards:
            raise BadArgument("expected a list of rewards", key="rewards", value=rewards)
        if weights is not None and len(weights) != len(rewards):
            raise BadArgument(
                f"there are {len(rewards)} rewards", key="weights", value=weights, fix="Give one for each."
            )
        self._weights = dict(zip(rewards, weights or [1.0] * len(rewards), strict=True))

    def reward_names(self) -> list[str]:
        return list(self._weights)

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        columns = [[weight * score for score in scores[name]] for name, weight in self._weights.items()]
        return [sum(parts) for parts in zip(*columns, strict=True)]
