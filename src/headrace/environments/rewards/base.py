"""What a reward is, and the bundle of named rewards that an environment scores an answer with.

A reward is any callable of the answer's text and the task's data that gives a number, or an awaitable of one. One that
has something to give back (processes, connections) has an `async close()`. Left out: weights. Rewards are summed as
they are; `scaled` makes one count for more or less.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from headrace.environments.base import EpisodeError
from headrace.environments.fault import fault_of
from headrace.environments.sandbox import PATIENCE, CallFailed, CallTimeout, Sandbox
from headrace.errors import BadInput

log = logging.getLogger(__name__)


class Reward(Protocol):
    """`text` is what the model answered, `data` the task's; the gold answer is one of its fields."""

    def __call__(self, text: str, data: Mapping[str, Any], /) -> float | Awaitable[float]: ...


class Rewards:
    """Rewards by name. Those of a sequence are named by their `name`, else by their `__name__`.

    Asynchronous ones run side by side, each for at most `timeout` seconds, unless it says that it is `bounded`: it has
    a limit of its own, and may have to stand in line before. A synchronous one cannot be interrupted: one that may take
    long belongs `in_sandbox`.
    """

    def __init__(self, rewards: Mapping[str, Reward] | Sequence[Reward], *, timeout: float = 60.0) -> None:
        self._rewards = dict(rewards) if isinstance(rewards, Mapping) else _named(rewards)
        self._timeout = timeout
        for name, reward in self._rewards.items():
            if not callable(reward):
                raise BadInput(f"a {type(reward).__name__}, which cannot be called", key=f"rewards.{name}")

    async def score(self, text: str, data: Mapping[str, Any]) -> dict[str, float]:
        """Every reward's number. Raises `EpisodeError` if one has none: what failed is the reward, not the answer."""
        asked = (self._score_one(name, reward, text, data) for name, reward in self._rewards.items())
        scores = await asyncio.gather(*asked, return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        return dict(zip(self._rewards, scores, strict=True))  # type: ignore[arg-type]

    async def close(self) -> None:
        for reward in self._rewards.values():
            await close(reward)

    async def _score_one(self, name: str, reward: Reward, text: str, data: Mapping[str, Any]) -> float:
        limit = asyncio.timeout(None if getattr(reward, "bounded", False) else self._timeout)
        try:
            async with limit:
                value = reward(text, data)
                return _finite(name, await value if inspect.isawaitable(value) else value)
        except EpisodeError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _failure(name, error) from error  # it cancelled itself
        except (Exception, SystemExit) as error:
            if isinstance(error, CallTimeout) or limit.expired():
                words = str(error) or f"it took longer than {self._timeout:g} s"
                raise EpisodeError("reward_timeout", f"reward {name!r}: {words}", place=f"{name} timeout") from error
            raise _failure(name, error) from error


def scaled(reward: Reward, factor: float) -> Reward:
    """A reward that counts `factor` times."""
    return _Scaled(reward, factor)


def in_sandbox(function: str, timeout: float = 2.0, processes: int = 2) -> Reward:
    """A synchronous reward function, `package.module:name`, in processes of its own, where it can be killed."""
    return _InSandbox(function, timeout, processes)


async def close(reward: Reward) -> None:
    """Have a reward give back what it holds, if it is one that does."""
    closing = getattr(reward, "close", None)
    if closing is not None:
        await closing()


class _Scaled:
    def __init__(self, reward: Reward, factor: float) -> None:
        self.name = name_of(reward)
        self.bounded = getattr(reward, "bounded", False)
        self._reward = reward
        self._factor = factor

    def __call__(self, text: str, data: Mapping[str, Any]) -> float | Awaitable[float]:
        value = self._reward(text, data)
        return self._scale(value) if inspect.isawaitable(value) else self._factor * value

    async def _scale(self, value: Awaitable[float]) -> float:
        return self._factor * await value

    async def close(self) -> None:
        await close(self._reward)


class _InSandbox:
    bounded = True

    def __init__(self, function: str, timeout: float, processes: int) -> None:
        module, _, self.name = function.partition(":")
        if not (module and self.name):
            raise BadInput("not an import path", key="function", value=function, fix="Write package.module:function.")
        self._function = function
        self._timeout = timeout
        self._sandbox = Sandbox(processes)

    async def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        value: float = await self._sandbox.call(
            self._function, text, dict(data), timeout=self._timeout, patience=PATIENCE
        )
        return value

    async def close(self) -> None:
        await self._sandbox.close()


def gold_of(data: Mapping[str, Any], field: str) -> Any:
    """The field of a task that a reward compares with."""
    if field not in data:
        raise LookupError(f"the task has no field {field!r}, only {', '.join(map(repr, data)) or 'none at all'}")
    return data[field]


def warn_of_count(name: str, what: str, count: int) -> None:
    """Log what a reward counts, at the first and whenever it has doubled; `what` is such as "answers cut short"."""
    if count > 0 and count & (count - 1) == 0:
        log.warning("reward %r: %s: %d so far in this process", name, what, count)


def name_of(reward: Reward) -> str:
    """Its own name, or "" if it has none."""
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return name if isinstance(name, str) else ""


def _named(rewards: Sequence[Reward]) -> dict[str, Reward]:
    named: dict[str, Reward] = {}
    fix = "Give rewards as {name: reward}."
    for reward in rewards:
        name = name_of(reward)
        if not name:
            raise BadInput(f"a reward of type {type(reward).__name__} has no name", key="rewards", fix=fix)
        if name in named:
            raise BadInput("two rewards have this name", key=f"rewards.{name}", fix=fix)
        named[name] = reward
    return named


def _finite(name: str, value: Any) -> float:
    """Return any number, numpy's and booleans included, as a float; what is none needs no traceback."""
    words = f"it gave {_short(value)}, a {type(value).__name__}, where a number belongs"
    if hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            words = f"it gave {_short(value)}, where a number belongs: {error}"
        else:
            if math.isfinite(number):
                return number
            words = f"it gave {number}, where a finite number belongs"
    raise EpisodeError("reward_no_number", f"reward {name!r}: {words}", place=f"{name} no number")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _failure(name: str, error: BaseException) -> EpisodeError:
    """What a reward raised, with the place of it, so that each place is reported once."""
    if isinstance(error, CallFailed):
        place, trace, words = f"{name} {error.kind}", error.remote_traceback, str(error)
    else:
        fault = fault_of(error)
        place, trace, words = fault.place, fault.traceback, fault.text
    return EpisodeError("reward_failed", f"reward {name!r}: {words}", place=place, remote_traceback=trace)
