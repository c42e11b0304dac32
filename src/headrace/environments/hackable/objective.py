"""The base class of objectives, which combine the scores of rewards into the reward of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from headrace.environments.hackable.samples import TrainingSample


class Progress(NamedTuple):
    """How far the policy that sampled a completion had been trained: optimizer steps and passes over the data."""

    step: int = 0
    epoch: float = 0.0


class Objective:
    """Base of all objectives: subclass, and implement `reward_names` and `combine_rewards`; all else is optional.

    An objective has no state: what changes in the course of a run follows from `Progress`, so that a resumed run
    continues with the same values.
    """

    algorithm: ClassVar[str | dict[str, Any]] = "grpo"
    """The algorithm that credits the rollouts of its groups, as a value of `orchestrator.train.env.algo`."""

    def reward_names(self) -> list[str]:
        """Return the rewards that it combines: registered names, import paths or files."""
        raise NotImplementedError

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        """Return the reward of each completion, given each reward's score of each of them."""
        raise NotImplementedError

    def extra_reward(self, samples: Sequence[TrainingSample], completions: Sequence[str]) -> list[float] | None:
        """Return a further signal for each completion, which is added to the combined rewards."""
        return None

    def roles(self) -> dict[str, str]:
        """Return which rewards score correctness (`correct`) and format (`format`)."""
        return {"correct": "gsm8k_correctness_reward", "format": "format_tag_reward"}

    def at(self, progress: Progress) -> Self:
        """Return the objective as it is at this progress."""
        return self

    def metrics(self) -> dict[str, float]:
        """Return the values that change in the course of a run, to be logged."""
        return {}
