"""Runs the episodes that the scheduler chose, and makes sure that each of them arrives exactly once.

Whatever happens to an episode (success, environment error, timeout, cancellation, nothing produced), it ends as an
arrival with at least one rollout; a failure is a rollout with `error` set.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable

import msgspec

from headrace.environments.base import Context, Environment
from headrace.inference.client import EngineCallError
from headrace.orchestrator.scheduler import Episode
from headrace.rollout.types import Rollout, RolloutError

log = logging.getLogger(__name__)


class Arrival(msgspec.Struct):
    """An episode that has ended, with what it produced."""

    episode: Episode
    rollouts: list[Rollout]


class EpisodeRunner(msgspec.Struct):
    """What it takes to run an episode of one environment; `process` is what happens to a rollout before it arrives."""

    environment: Environment
    context: Context
    timeout: float | None
    process: Callable[[Rollout], Awaitable[None]] | None = None


class Dispatcher:
    """`runners` by (kind, environment name); `deliver` is called once per started episode."""

    def __init__(self, runners: dict[tuple[str, str], EpisodeRunner], deliver: Callable[[Arrival], None]) -> None:
        self._runners = runners
        self._deliver = deliver
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancel_reason: dict[int, str] = {}
        self._reported: set[str] = set()

    def start(self, episode: Episode) -> None:
        task = self._tasks[episode.id] = asyncio.create_task(self._run(episode))
        # `_run` turns a cancellation into an arrival itself, unless it came before its first step.
        task.add_done_callback(lambda done: self._arrive_cancelled(episode) if done.cancelled() else None)

    def cancel(self, episode: Episode, reason: str) -> None:
        """Stop an episode; it still arrives, as an error with this reason."""
        task = self._tasks.get(episode.id)
        if task is not None:  # else its arrival is already on the way
            self._cancel_reason[episode.id] = reason
            task.cancel()

    async def close(self) -> None:
        """Cancel whatever still runs and wait until all of it has arrived."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, episode: Episode) -> None:
        started = time.monotonic()
        try:
            rollouts = await self._attempt(episode)
        except asyncio.CancelledError:
            self._arrive_cancelled(episode)
            return
        for rollout in rollouts:
            rollout.timings["episode"] = time.monotonic() - started
        self._arrive(episode, rollouts)

    def _arrive_cancelled(self, episode: Episode) -> None:
        self._arrive(episode, [_failed(episode, self._cancel_reason.get(episode.id, "cancelled"), "")])

    def _arrive(self, episode: Episode, rollouts: list[Rollout]) -> None:
        del self._tasks[episode.id]
        self._cancel_reason.pop(episode.id, None)
        self._deliver(Arrival(episode, rollouts))

    async def _attempt(self, episode: Episode) -> list[Rollout]:
        """The episode's rollouts, processed; any failure but cancellation becomes a rollout that says so."""
        runner = self._runners[episode.kind, episode.env]
        limit = asyncio.timeout(runner.timeout)
        try:
            async with limit:
                rollouts = await runner.environment.run(episode.group.task, runner.context)
        except EngineCallError as error:
            return [_failed(episode, "engine", f"{type(error).__name__}: {error}")]
        except Exception as error:  # whatever a user's environment raises costs its episode, not the run
            if limit.expired():
                return [_failed(episode, "timeout", f"the episode took longer than {runner.timeout} s")]
            return [self._fault(episode, "environment", error)]
        try:
            for rollout in rollouts:
                _stamp(rollout, episode)
                if runner.process is not None:
                    await runner.process(rollout)
        except Exception as error:  # likewise for a user's algorithm, or turns that do not fit together
            return [self._fault(episode, "algorithm", error)]
        return rollouts or [_failed(episode, "empty", "the environment returned no rollout")]

    def _fault(self, episode: Episode, reason: str, error: Exception) -> Rollout:
        """A failed rollout. The first error from a place in the code gets its traceback; the rest are counted."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{episode.env} {type(error).__name__} {frame.filename}:{frame.lineno}"
        if place not in self._reported:
            self._reported.add(place)
            log.error(
                "an episode of %s failed (%s); further failures alike are only counted",
                episode.env,
                reason,
                exc_info=error,
            )
        return _failed(episode, reason, f"{type(error).__name__}: {error}")


def _failed(episode: Episode, reason: str, detail: str) -> Rollout:
    rollout = Rollout(error=RolloutError(reason, detail))
    _stamp(rollout, episode)
    return rollout


def _stamp(rollout: Rollout, episode: Episode) -> None:
    """Fill in what environments must not know, and check what they returned."""
    rollout.env = episode.env
    rollout.task_key = episode.group.task.key
    rollout.group_id = episode.group.id
    rollout.draw_id = episode.group.draw_id
    if rollout.error is not None:
        return
    if not any(turn.completion_ids for turn in rollout.turns):
        rollout.error = RolloutError("empty", "the rollout has no sampled token")
        return
    rollout.reward = float(sum(rollout.rewards.values())) if rollout.rewards else math.nan
    if not math.isfinite(rollout.reward):
        rollout.error = RolloutError("invalid_reward", f"rewards {rollout.rewards} do not sum to a finite number")
