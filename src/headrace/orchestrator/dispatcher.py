"""Runs the episodes that the scheduler chose, and makes sure that each of them arrives exactly once.

Whatever happens to an episode (success, environment error, timeout, cancellation, nothing produced), it ends as an
arrival with at least one rollout; a failure is a rollout with `error` set.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
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
        self._tasks[episode.id] = asyncio.create_task(self._run(episode))

    def cancel(self, episode: Episode, reason: str) -> None:
        """Stop an episode; it still arrives, as an error with this reason."""
        self._cancel_reason[episode.id] = reason
        self._tasks[episode.id].cancel()

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
            rollouts = [_failed(episode, self._cancel_reason.get(episode.id, "cancelled"), "")]
        del self._tasks[episode.id]
        self._cancel_reason.pop(episode.id, None)
        for rollout in rollouts:
            rollout.timings["episode"] = time.monotonic() - started
        self._deliver(Arrival(episode, rollouts))

    async def _attempt(self, episode: Episode) -> list[Rollout]:
        """The episode's rollouts, processed; any failure but cancellation becomes a rollout that says so."""
        runner = self._runners[episode.kind, episode.env]
        limit = asyncio.timeout(runner.timeout)
        try:
            async with limit:
                rollouts = await runner.environment.run(episode.group.task, runner.context)
            for rollout in rollouts:
                _stamp(rollout, episode)
                if runner.process is not None:
                    await runner.process(rollout)
        except EngineCallError as error:
            return [_failed(episode, "engine", f"{type(error).__name__}: {error}")]
        except Exception as error:  # whatever a user's environment raises costs its episode, not the run
            if limit.expired():
                return [_failed(episode, "timeout", f"the episode took longer than {runner.timeout} s")]
            self._report(episode.env, error)
            return [_failed(episode, "environment", f"{type(error).__name__}: {error}")]
        return rollouts or [_failed(episode, "empty", "the environment returned no rollout")]

    def _report(self, env: str, error: Exception) -> None:
        """The first occurrence of an error gets its traceback; the rest are counted."""
        kind = f"{env}: {type(error).__name__}: {error}"
        if kind not in self._reported:
            self._reported.add(kind)
            log.error("environment %s failed an episode (further ones alike are only counted)", env, exc_info=error)


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
