"""Named rewards, run side by side with time limits.

A reward is a user's code: it may raise, hang, or return too few numbers or none. Such a reward has failed for the
completions that it was called with; the scores of other rewards are kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.environments.arguments import BadArgument
from headrace.environments.base import EpisodeError
from headrace.environments.fault import fault_of
from headrace.environments.rewards.base import (
    AnyReward,
    Data,
    batch_arguments,
    close_reward,
    form_of,
    keyword_columns,
    name_of,
    resolve_reward,
)
from headrace.environments.sandbox import CallFailed, CallTimeout
from headrace.environments.time_limit import LimitedFunction, OutOfTime
from headrace.observe import tracing

FAILED = "reward_failed"
TIMED_OUT = "reward_timeout"
NOT_A_NUMBER = "reward_no_number"
WRONG_COUNT = "reward_wrong_count"


class RewardFailure(NamedTuple):
    """Why a completion has no score: the reward that failed, one of the reasons above, and the details.

    `place` is the same for failures that are to be reported once; `traceback` is "" where the text says it all.
    """

    name: str
    reason: str
    text: str
    place: str
    traceback: str = ""
    error: BaseException | None = None


Score = float | RewardFailure


class Rewards:
    """Rewards by name. Those of a sequence are named by their `name`, else by their `__name__`.

    A value may also be what a run file has: the name, import path or file of a registered reward, or a table of `name`,
    `kwargs` and `weight`. Each call is limited to `timeout` seconds, unless the reward is `bounded`. A synchronous
    reward of one completion runs in the event loop, where it cannot be interrupted, unless `in_threads` is set; a group
    reward runs in a thread. One that may never return belongs `in_sandbox`. `argument` is the environment's argument
    that has the rewards, for errors.
    """

    def __init__(
        self,
        rewards: Mapping[str, Any] | Sequence[Any],
        *,
        timeout: float = 60.0,
        in_threads: bool = False,
        argument: str = "rewards",
    ) -> None:
        self.rewards = _name_rewards(rewards, argument)
        self._forms = {name: form_of(reward) for name, reward in self.rewards.items()}
        self._calls: dict[str, LimitedFunction] = {}
        for name, reward in self.rewards.items():
            bounded = getattr(reward, "bounded", False)
            in_thread = self._forms[name] != "completion" or (in_threads and not bounded)
            self._calls[name] = LimitedFunction(reward, None if bounded else timeout, in_thread)

    @property
    def have_groups(self) -> bool:
        """Whether any reward scores whole groups."""
        return any(form != "completion" for form in self._forms.values())

    async def score(self, text: str, data: Data) -> dict[str, float]:
        """Return the score of one completion by each reward of one completion; group rewards are left out.

        Raises `EpisodeError` if one fails: the fault is the reward's, not the answer's.
        """
        names = [name for name, form in self._forms.items() if form == "completion"]
        scores = await asyncio.gather(*(self._score_completion(name, text, data) for name in names))
        for score in scores:
            if isinstance(score, RewardFailure):
                if isinstance(score.error, EpisodeError):
                    raise score.error
                failed = EpisodeError(score.reason, score.text, place=score.place, remote_traceback=score.traceback)
                raise failed from score.error
        return dict(zip(names, scores, strict=True))  # type: ignore[arg-type]

    async def score_group(
        self, texts: Sequence[str], data: Sequence[Data], *, group_rewards_only: bool = False
    ) -> dict[str, list[Score]]:
        """Return the score of every completion of a group by each reward, or why there is none. Raises nothing."""
        names = [name for name, form in self._forms.items() if form != "completion" or not group_rewards_only]
        columns = await asyncio.gather(*(self._score_column(name, texts, data) for name in names))
        return dict(zip(names, columns, strict=True))

    async def close(self) -> None:
        for reward in self.rewards.values():
            await close_reward(reward)

    async def _score_completion(self, name: str, text: str, data: Data) -> Score:
        value = await self._call(name, text, data)
        return value if isinstance(value, RewardFailure) else read_score(name, f"reward {name!r}", value)

    async def _score_column(self, name: str, texts: Sequence[str], data: Sequence[Data]) -> list[Score]:
        """Return the score of every completion by one reward."""
        if self._forms[name] == "completion":
            pairs = zip(texts, data, strict=True)
            return list(await asyncio.gather(*(self._score_completion(name, *pair) for pair in pairs)))
        form = self._forms[name]
        if form == "columns":
            values = await self._call(name, **keyword_columns(texts, data))
        else:
            columns = batch_arguments(texts, data) if form == "batch" else (list(texts), list(data))
            values = await self._call(name, *columns)
        if isinstance(values, RewardFailure):
            return [values] * len(texts)
        return read_scores(name, f"reward {name!r}", values, len(texts))

    async def _call(self, name: str, *args: Any, **columns: Any) -> Any:
        """Return what the reward returns, or a `RewardFailure`."""
        try:
            with tracing.span("reward", reward=name):
                return await self._calls[name](*args, **columns)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the caller was cancelled; otherwise the reward cancelled itself
            return describe_failure(name, f"reward {name!r}", error)


def describe_failure(name: str, what: str, error: BaseException) -> RewardFailure:
    """Return the failure for an exception that a user's code raised; `what` names that code."""
    if isinstance(error, OutOfTime | CallTimeout):
        return RewardFailure(name, TIMED_OUT, f"{what}: {error}", f"{name} timeout", error=error)
    if isinstance(error, CallFailed):
        place, trace, text = f"{name} {error.kind}", error.remote_traceback, str(error)
    else:
        fault = fault_of(error)
        place, trace, text = fault.place, fault.traceback, fault.text
    return RewardFailure(name, FAILED, f"{what}: {text}", place, trace, error)


def read_scores(name: str, what: str, values: Any, count: int) -> list[Score]:
    """Return the score of each of `count` completions from what a user's code returned."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        fact = f"expected a list of {count} numbers, got {_shorten(values)}"
        return [RewardFailure(name, NOT_A_NUMBER, f"{what}: {fact}", f"{name} no list")] * count
    listed = list(values)
    if len(listed) != count:
        fact = f"expected {count} numbers, one per completion, got {len(listed)}"
        return [RewardFailure(name, WRONG_COUNT, f"{what}: {fact}", f"{name} wrong count")] * count
    return [read_score(name, what, value) for value in listed]


def read_score(name: str, what: str, value: Any) -> Score:
    """Return a value as a float: any finite number, numpy's and booleans included."""
    fact = f"expected a number, got {_shorten(value)}"
    if hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            fact += f": {error}"
        else:
            if math.isfinite(number):
                return number
            fact = f"expected a finite number, got {number}"
    return RewardFailure(name, NOT_A_NUMBER, f"{what}: {fact}", f"{name} no number")


def _shorten(value: Any) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 80 else f'{shown[:77]}...'}, a {type(value).__name__}"


def _name_rewards(rewards: Mapping[str, Any] | Sequence[Any], argument: str) -> dict[str, AnyReward]:
    """Return the resolved rewards by name; raise for a missing or repeated name."""
    if isinstance(rewards, Mapping):
        pairs = [(name, resolve_reward(reward, f"{argument}.{name}")) for name, reward in rewards.items()]
    else:
        built = [resolve_reward(reward, f"{argument}.{number}") for number, reward in enumerate(rewards)]
        pairs = [(name_of(reward), reward) for reward in built]
    named: dict[str, AnyReward] = {}
    fix = "Give rewards as {name: reward}."
    for name, reward in pairs:
        if not name:
            raise BadArgument(f"a reward of type {type(reward).__name__} has no name", key=argument, fix=fix)
        if name in named:
            raise BadArgument("two rewards have this name", key=f"{argument}.{name}", fix=fix)
        named[name] = reward
    return named
