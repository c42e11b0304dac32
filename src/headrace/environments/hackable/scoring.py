"""Scoring of a group by all rewards of an objective.

A completion for which a reward or the objective fails is marked with the reason, and counted; the others keep their
reward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import msgspec

from headrace.environments.hackable.registry import NO_TRACE, Objective, Progress, Trace
from headrace.environments.hackable.samples import TrainingSample
from headrace.environments.rewards.base import AnyReward
from headrace.environments.rewards.running import RewardFailure, Rewards, Score, failure_of, numbers_of
from headrace.rollout.types import RolloutError

log = logging.getLogger(__name__)

OBJECTIVE = "objective"
"""The name, among those of rewards, under which an objective's own failures are counted."""


class Scored(msgspec.Struct, frozen=True):
    """The scores of one completion by the names of the rewards, and the reward that the objective combines them to.

    With an `error` there is no `reward`, and `scores` has those of the rewards that did not fail.
    """

    scores: dict[str, float]
    reward: float | None = None
    error: RolloutError | None = None


class Scorer:
    """The rewards of an objective; `timeout` limits one call of a reward, in seconds, unless it is `bounded`."""

    def __init__(self, objective: Objective, rewards: Mapping[str, AnyReward], timeout: float = 60.0) -> None:
        self._objective = objective
        self._rewards = Rewards(rewards, timeout=timeout, in_threads=True)
        self._failures: Counter[str] = Counter()
        self._reported: set[str] = set()

    async def score(
        self,
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        progress: Progress | None = None,
        traces: Sequence[Trace] | None = None,
    ) -> list[Scored]:
        """Score each completion of a group, or of several groups. Failures of rewards are counted, never raised."""
        traces = [NO_TRACE] * len(completions) if traces is None else traces
        if len(samples) != len(completions):
            raise ValueError(f"{len(completions)} completions of {len(samples)} samples")
        table = await self._rewards.score_group(completions, [sample.data for sample in samples])
        rows = [{name: column[index] for name, column in table.items()} for index in range(len(samples))]
        failures = [next((s for s in row.values() if isinstance(s, RewardFailure)), None) for row in rows]
        whole = [index for index, failure in enumerate(failures) if failure is None]
        scores = {name: [column[index] for index in whole] for name, column in table.items()}
        parts = [samples[i] for i in whole], [completions[i] for i in whole], [traces[i] for i in whole]
        combined = iter(self._combine(scores, *parts, progress=progress or Progress()))
        results = [next(combined) if failure is None else failure for failure in failures]
        return [self._scored(row, result) for row, result in zip(rows, results, strict=True)]

    @property
    def counts(self) -> dict[str, int]:
        """Completions without a reward, by `REWARD/REASON`, and the rewards' own counters, by `REWARD/NAME`."""
        own = {
            f"{name}/{counter}": count
            for name, reward in self._rewards.rewards.items()
            for counter, count in getattr(reward, "counts", {}).items()
        }
        return {**own, **self._failures}

    async def close(self) -> None:
        await self._rewards.close()

    def _combine(
        self,
        scores: Mapping[str, Sequence[Any]],
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        traces: Sequence[Trace],
        *,
        progress: Progress,
    ) -> list[Score]:
        """Return the objective's reward of each completion that every reward has scored."""
        if not samples:
            return []
        try:
            objective = self._objective.at(progress)
            combined = objective.combine_rewards(scores, samples)
            arguments = samples, completions, traces
            accepted = signature(objective.extra_reward).parameters  # an objective may leave out the traces
            extra = objective.extra_reward(*(arguments if len(accepted) > 2 else arguments[:2]))
        except Exception as error:
            return [failure_of(OBJECTIVE, "the objective", error)] * len(samples)
        results = numbers_of(OBJECTIVE, "combine_rewards of the objective", combined, len(samples))
        if extra is None:
            return results
        extras = numbers_of(OBJECTIVE, "extra_reward of the objective", extra, len(samples))
        return [
            a if isinstance(a, RewardFailure) else b if isinstance(b, RewardFailure) else a + b
            for a, b in zip(results, extras, strict=True)
        ]

    def _scored(self, row: Mapping[str, Score], result: Score) -> Scored:
        scores = {name: score for name, score in row.items() if not isinstance(score, RewardFailure)}
        if not isinstance(result, RewardFailure):
            return Scored(scores, result)
        counter = f"{result.name}/{result.reason}"
        self._failures[counter] += 1
        if result.traceback and result.place not in self._reported:
            log.error("%s; further failures at the same place are only counted\n%s", result.text, result.traceback)
        elif self._failures[counter] == 1:
            log.warning("%s; the completion is marked, and further ones as %s are only counted", result.text, counter)
        self._reported.add(result.place)
        return Scored(scores, error=RolloutError(result.reason, result.text))
