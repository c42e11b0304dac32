"""All rewards of an objective on the completions of a group, and what each of them comes to, or why that is not known.

A reward is a user's code: it may raise, hang, give too few numbers or none at all. Then the completions that have no
score are marked with the reason, and counted; the others keep theirs. A reward that raises or hangs has scored none of
the group, since it was given all of it at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.environments.fault import fault_of
from headrace.environments.hackable.limited import Limited, OutOfTime
from headrace.environments.hackable.objective import Objective, Progress
from headrace.environments.hackable.registry import Reward
from headrace.environments.hackable.samples import TrainingSample
from headrace.environments.sandbox import CallTimeout
from headrace.rollout.types import RolloutError

log = logging.getLogger(__name__)

FAILED = "reward_failed"
TIMED_OUT = "reward_timeout"
NO_NUMBER = "reward_no_number"
WRONG_COUNT = "reward_wrong_count"
OBJECTIVE = "objective"
"""The name, among those of rewards, under which an objective's own failures are counted."""


class Scored(msgspec.Struct, frozen=True):
    """What one completion earned: every reward's score by its name, and what the objective makes of them.

    With an `error` there is no `reward`, and `scores` has those of the rewards that did not fail.
    """

    scores: dict[str, float]
    reward: float | None = None
    error: RolloutError | None = None


class _Failure(NamedTuple):
    """Why there is no number; `name` is whose."""

    name: str
    reason: str
    words: str


Value = float | _Failure


class Scorer:
    """`timeout` is what each reward may take over a group, in seconds, unless it is `bounded` by itself."""

    def __init__(self, objective: Objective, rewards: Mapping[str, Reward], timeout: float = 60.0) -> None:
        self._objective = objective
        self._rewards = dict(rewards)
        self._calls = {
            name: Limited(reward, None if getattr(reward, "bounded", False) else timeout)
            for name, reward in self._rewards.items()
        }
        self._failures: Counter[str] = Counter()
        self._reported: set[str] = set()

    async def score(
        self, samples: Sequence[TrainingSample], completions: Sequence[str], progress: Progress | None = None
    ) -> list[Scored]:
        """Each completion of a group, or of several whole ones. No fault of a reward is raised; all are counted."""
        if len(samples) != len(completions):
            raise ValueError(f"{len(completions)} completions of {len(samples)} samples")
        asked = (self._column(name, samples, completions) for name in self._rewards)
        table: dict[str, list[Value]] = dict(zip(self._rewards, await asyncio.gather(*asked), strict=True))
        worth = self._worth(table, samples, completions, progress or Progress())
        return [
            self._scored({name: column[place] for name, column in table.items()}, value)
            for place, value in enumerate(worth)
        ]

    @property
    def counts(self) -> dict[str, int]:
        """Completions without a reward, by `REWARD/REASON`, and what rewards count by themselves, by `REWARD/NAME`."""
        own = {
            f"{name}/{what}": count
            for name, reward in self._rewards.items()
            for what, count in getattr(reward, "counts", {}).items()
        }
        return {**own, **self._failures}

    async def close(self) -> None:
        """Have every reward give back what it holds."""
        for reward in self._rewards.values():
            closing = getattr(reward, "close", None)
            if closing is not None:
                await closing()

    async def _column(self, name: str, samples: Sequence[TrainingSample], completions: Sequence[str]) -> list[Value]:
        """One reward's score of each completion, or why there is none."""
        prompts, answers = [sample.prompt for sample in samples], [sample.answer for sample in samples]
        try:
            given = await self._calls[name](prompts, list(completions), answers, [sample.info for sample in samples])
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            return [self._failure(name, f"reward {name!r}", error)] * len(samples)
        return _values(name, f"reward {name!r}", given, len(samples))

    def _worth(
        self,
        table: Mapping[str, Sequence[Value]],
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        progress: Progress,
    ) -> list[Value]:
        """What the objective makes of the completions that every reward has scored; of the others, the first fault."""
        rows = [[column[place] for column in table.values()] for place in range(len(samples))]
        worth: list[Value] = [_first_failure(row) or 0.0 for row in rows]
        whole = [place for place, value in enumerate(worth) if not isinstance(value, _Failure)]
        scores = {name: [column[place] for place in whole] for name, column in table.items()}
        combined = self._combined(scores, [samples[i] for i in whole], [completions[i] for i in whole], progress)
        for place, value in zip(whole, combined, strict=True):
            worth[place] = value
        return worth

    def _combined(
        self,
        scores: Mapping[str, Sequence[Any]],
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        progress: Progress,
    ) -> list[Value]:
        if not samples:
            return []
        try:
            objective = self._objective.at(progress)
            combined = objective.combine_rewards(scores, samples)
            extra = objective.extra_reward(samples, completions)
        except Exception as error:
            return [self._failure(OBJECTIVE, "the objective", error)] * len(samples)
        worth = _values(OBJECTIVE, "combine_rewards of the objective", combined, len(samples))
        if extra is None:
            return worth
        return list(map(_sum, worth, _values(OBJECTIVE, "extra_reward of the objective", extra, len(samples))))

    def _scored(self, scores: Mapping[str, Value], worth: Value) -> Scored:
        known = {name: score for name, score in scores.items() if not isinstance(score, _Failure)}
        if not isinstance(worth, _Failure):
            return Scored(known, worth)
        counter = f"{worth.name}/{worth.reason}"
        self._failures[counter] += 1
        if self._failures[counter] == 1:
            log.warning("%s; the completion is marked, and further ones as %s are only counted", worth.words, counter)
        return Scored(known, error=RolloutError(worth.reason, worth.words))

    def _failure(self, name: str, what: str, error: BaseException) -> _Failure:
        """What a user's code raised. The first from a place is told in full; the rest are counted."""
        if isinstance(error, OutOfTime | CallTimeout):
            return _Failure(name, TIMED_OUT, f"{what}: {error}")
        fault = fault_of(error)
        if fault.place not in self._reported:
            self._reported.add(fault.place)
            log.error("%s failed (%s); further failures alike are only counted\n%s", what, fault.text, fault.traceback)
        return _Failure(name, FAILED, f"{what}: {fault.text}")


def _values(name: str, what: str, given: Any, count: int) -> list[Value]:
    """What a user's code gave for each of so many completions."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        words = f"{what} gave {_short(given)}, where a list of {count} numbers belongs"
        return [_Failure(name, NO_NUMBER, words)] * count
    values = list(given)
    if len(values) != count:
        return [_Failure(name, WRONG_COUNT, f"{what} gave {len(values)} values for {count} completions")] * count
    return [_value(name, what, value) for value in values]


def _value(name: str, what: str, given: Any) -> Value:
    """Anything that is a finite number, numpy's and booleans included."""
    if not hasattr(given, "__float__"):
        return _Failure(name, NO_NUMBER, f"{what} gave {_short(given)}, where a number belongs")
    number = float(given)
    return number if math.isfinite(number) else _Failure(name, NO_NUMBER, f"{what} gave {number}, which is not finite")


def _sum(one: Value, other: Value) -> Value:
    if isinstance(one, _Failure):
        return one
    return other if isinstance(other, _Failure) else one + other


def _first_failure(values: Iterable[Value]) -> _Failure | None:
    return next((value for value in values if isinstance(value, _Failure)), None)


def _short(value: Any) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 80 else f'{shown[:77]}...'}, a {type(value).__name__}"


def _is_being_cancelled() -> bool:
    """Whether somebody cancelled this task, rather than the reward itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
