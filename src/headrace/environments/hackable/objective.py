"""What an objective is: which rewards it asks for, and what a completion is worth, given what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from headrace.environments.hackable.samples import TrainingSample


class Progress(NamedTuple):
    """How far the policy that wrote a completion had been trained: optimizer steps, and passes over the data."""

    step: int = 0
    epoch: float = 0.0


class Objective:
    """Base of all objectives: subclass, and implement `reward_names` and `combine_rewards`; all else is optional.

    An objective keeps no state: what changes in the course of a run follows from `Progress`, so that it is the same
    after a resume.
    """

    algorithm: ClassVar[str | dict[str, Any]] = "grpo"
    """What credits the rollouts of its groups, as `orchestrator.train.env.algo` takes it."""

    def reward_names(self) -> list[str]:
        """The rewards that it combines, by registered name or import path."""
        raise NotImplementedError

    def combine_rewards(self, scores: Mapping[str, Sequence[float]], samples: Sequence[TrainingSample]) -> list[float]:
        """What each completion is worth, given what each reward said about each of them."""
        raise NotImplementedError

    def extra_reward(self, samples: Sequence[TrainingSample], completions: Sequence[str]) -> list[float] | None:
        """A signal besides the rewards, added to what they were combined to."""
        return None

    def roles(self) -> dict[str, str]:
        """Which of the rewards says whether a completion is right (`correct`) and in format (`format`)."""
        return {"correct": "gsm8k_correctness_reward", "format": "format_tag_reward"}

    def at(self, progress: Progress) -> Self:
        """The objective as it is by then."""
        return self

    def metrics(self) -> dict[str, float]:
        """What of it changes in the course of a run, to be logged."""
        return {}
