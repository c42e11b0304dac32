"""Runs the episodes that the pipeline chose; each arrives exactly once.

Whatever happens to an episode (success, environment error, timeout, cancellation, no result), it ends as an arrival
with at least one rollout; a failure is a rollout with `error` set. An episode that ignores its cancellation is
abandoned after a grace period: it arrives as cancelled, and its later results are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.fault import CANCELLED_ITSELF, fault_of
from headrace.inference.client.errors import EngineCallError
from headrace.observe import tracing
from headrace.orchestrator.signals import Arrival, Episode
from headrace.rollout.checks import check_rollout, checked_rollouts
from headrace.rollout.types import Rollout, RolloutError, Task

log = logging.getLogger(__name__)

STARTS_PER_ITERATION = 8
"""Episodes that start in one iteration of the event loop: each renders a prompt and opens a connection."""
CANCEL_GRACE_S = 10.0
"""Time that a cancelled episode gets to end before it is abandoned."""


class ContextFactory(Protocol):
    """Gives the episodes of one environment access to a model."""

    def open(self, session: str, episode: str) -> Context:
        """Return the context of an episode. Episodes of one session prefer the same engine.

        `episode` is a name that is the same in a repetition of the run.
        """
        ...

    def close(self, session: str) -> None:
        """Release the context of an episode that ended."""
        ...


class EpisodeRunner(msgspec.Struct):
    """Environment, model and limits for the episodes of one environment."""

    environment: Environment
    contexts: ContextFactory
    timeout: float | None
    process: Callable[[Rollout, Task], Awaitable[None]] | None = None
    """Called with each rollout before it arrives."""
    text_only: bool = False
    """Whether the model is an API that returns text without tokens."""
    vocab_size: int | None = None
    """Vocabulary of the model that is trained on the rollouts; None if none is."""


class _RunningEpisode(msgspec.Struct):
    """An episode in flight."""

    episode: Episode
    task: asyncio.Task[list[Rollout]]
    started: float = msgspec.field(default_factory=time.monotonic)
    cancelled_with: RolloutError | None = None
    """Why the dispatcher cancelled it, if it did."""
    timer: asyncio.TimerHandle | None = None


class _StartLimiter:
    """Spreads the starts of many episodes over iterations of the event loop, so that they do not block it."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._admit)
        self._waiting.append(future)
        await future

    def _admit(self) -> None:
        for _ in range(min(STARTS_PER_ITERATION, len(self._waiting))):
            future = self._waiting.popleft()
            if not future.done():  # else it was cancelled
                future.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._admit)


class Dispatcher:
    """Runs episodes as tasks and calls `deliver` exactly once for each. `runners` are by kind and environment name."""

    def __init__(
        self,
        runners: dict[tuple[str, str], EpisodeRunner],
        deliver: Callable[[Arrival], None],
        grace_s: float = CANCEL_GRACE_S,
    ) -> None:
        self._runners, self._deliver, self._grace_s = runners, deliver, grace_s
        self._limiter = _StartLimiter()
        self._running: dict[int, _RunningEpisode] = {}
        self._logged: set[str] = set()

    def start(self, episode: Episode) -> None:
        runner = self._runners[episode.kind, episode.env]
        task = asyncio.create_task(self._run(episode, runner))
        running = self._running[episode.id] = _RunningEpisode(episode, task)
        if runner.timeout is not None:
            error = RolloutError("timeout", f"the episode took longer than {runner.timeout:g} s")
            running.timer = asyncio.get_running_loop().call_later(runner.timeout, self._cancel, running, error)
        task.add_done_callback(partial(self._on_end, running))

    def cancel(self, episode: Episode, reason: str) -> None:
        """Cancel an episode; it arrives as an error with this reason."""
        running = self._running.get(episode.id)
        if running is not None:  # else it has already arrived
            self._cancel(running, RolloutError(reason))

    def oldest(self) -> tuple[str, float] | None:
        """Return environment and age in seconds of the oldest episode in flight."""
        if not self._running:
            return None
        running = next(iter(self._running.values()))
        return running.episode.env, time.monotonic() - running.started

    async def close(self) -> None:
        """Cancel all episodes in flight and wait until they have arrived."""
        in_flight = list(self._running.values())
        for running in in_flight:
            self._cancel(running, RolloutError("cancelled"))
        if in_flight:
            await asyncio.wait([running.task for running in in_flight], timeout=self._grace_s)
        for running in in_flight:
            self._abandon(running)

    # -- one episode ----------------------------------------------------------------------------------------------

    async def _run(self, episode: Episode, runner: EpisodeRunner) -> list[Rollout]:
        await self._limiter.wait()
        names = {"env": episode.env, "task": episode.group.task.key, "kind": episode.kind, "episode": episode.name}
        with tracing.episode_span(episode.group.id, **names):
            return await self._run_traced(episode, runner)

    async def _run_traced(self, episode: Episode, runner: EpisodeRunner) -> list[Rollout]:
        """Return the processed rollouts of an episode; any failure but cancellation becomes a rollout with an error."""
        context = runner.contexts.open(episode.group.id, episode.name)
        task = episode.group.task
        try:
            # A copy: the episode may change the data, and others run on the same task.
            copy = msgspec.structs.replace(task, data=msgspec.msgpack.decode(msgspec.msgpack.encode(task.data)))
            rollouts = checked_rollouts(await runner.environment.run(copy, context))
        except EngineCallError as error:
            return [self._make_failed(episode, RolloutError("engine", fault_of(error).text))]
        except EpisodeError as error:
            failure = RolloutError(error.reason, fault_of(error).message)
            return [self._make_failed(episode, failure, error.place, error.remote_traceback)]
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an error of a user's environment fails its episode only, even sys.exit()
            return [self._make_faulty(episode, "environment", error)]
        finally:
            runner.contexts.close(episode.group.id)
        for rollout in rollouts:
            _set_identity(rollout, episode)
            check_rollout(rollout, runner.environment.scores_groups, runner.text_only, runner.vocab_size)
        try:
            for rollout in rollouts:
                if runner.process is not None:
                    await runner.process(rollout, task)
        except Exception as error:  # a user's algorithm, or turns that do not fit together
            return [self._make_faulty(episode, "algorithm", error)]
        for rollout in rollouts:
            if rollout.error is not None:
                self._log_failure(episode, rollout.error)
        return rollouts or [self._make_failed(episode, RolloutError("empty", "the environment returned no rollout"))]

    def _cancel(self, running: _RunningEpisode, error: RolloutError) -> None:
        if running.cancelled_with is None:
            running.cancelled_with = error
            running.task.cancel()
            if running.timer is not None:
                running.timer.cancel()
            running.timer = asyncio.get_running_loop().call_later(self._grace_s, self._abandon, running)

    def _abandon(self, running: _RunningEpisode) -> None:
        """Report a cancelled episode that has not ended as failed, and ignore its later result."""
        if running.episode.id in self._running and running.cancelled_with is not None:
            log.error(
                "an episode of %s did not end after its cancellation (%s) and is abandoned. An environment must let "
                "CancelledError through and not compute for long on the event loop (workers = N helps)",
                running.episode.env, running.cancelled_with.reason,
            )  # fmt: skip
            self._arrive(running, [self._make_failed(running.episode, running.cancelled_with)])

    def _on_end(self, running: _RunningEpisode, task: asyncio.Task[list[Rollout]]) -> None:
        """Deliver the rollouts of a task that has ended, or a failed one in their place."""
        if running.episode.id not in self._running:  # abandoned: it has arrived already
            if not task.cancelled():
                task.exception()
            return
        if running.cancelled_with is not None or task.cancelled():
            error = running.cancelled_with or RolloutError("environment", CANCELLED_ITSELF)
            self._arrive(running, [self._make_failed(running.episode, error)])
        elif (exception := task.exception()) is not None:
            self._arrive(running, [self._make_faulty(running.episode, "environment", exception)])
        else:
            self._arrive(running, task.result())

    def _arrive(self, running: _RunningEpisode, rollouts: list[Rollout]) -> None:
        del self._running[running.episode.id]
        if running.timer is not None:
            running.timer.cancel()
        for rollout in rollouts:
            rollout.timings["episode"] = time.monotonic() - running.started
        self._deliver(Arrival(running.episode, rollouts))

    # -- failures -------------------------------------------------------------------------------------------------

    def _make_faulty(self, episode: Episode, reason: str, error: BaseException) -> Rollout:
        """Return a rollout that failed with an exception of the user's code, and log where it was raised."""
        fault = fault_of(error)
        return self._make_failed(episode, RolloutError(reason, fault.text), fault.place, fault.traceback)

    def _make_failed(self, episode: Episode, error: RolloutError, place: str = "", trace: str = "") -> Rollout:
        """Return a rollout with an error in place of those of an episode, and log the error."""
        rollout = Rollout(error=error)
        _set_identity(rollout, episode)
        if error.detail:  # not of episodes that the pipeline cancelled
            self._log_failure(episode, error, place, trace)
        return rollout

    def _log_failure(self, episode: Episode, error: RolloutError, place: str = "", trace: str = "") -> None:
        """Log the first failure of each reason and place in the code; the others are only counted."""
        key = f"{episode.env} {error.reason} {place}"
        if key not in self._logged:
            self._logged.add(key)
            log.error(
                "an episode of %s failed (%s: %s); further failures like it are only counted%s",
                episode.env, error.reason, error.detail, f"\n{trace}" if trace else "",
            )  # fmt: skip


def _set_identity(rollout: Rollout, episode: Episode) -> None:
    """Set the fields that say to which environment, task, group and episode a rollout belongs."""
    rollout.env = episode.env
    rollout.task_key = episode.group.task.key
    rollout.group_id = episode.group.id
    rollout.draw_id = episode.group.draw_id
    rollout.episode = episode.index
    rollout.credited = 0
