"""Runs the episodes that the pipeline chose, and makes sure that each of them arrives exactly once.

Whatever happens to an episode (success, environment error, timeout, cancellation, nothing produced), it ends as an
arrival with at least one rollout; a failure is a rollout with `error` set. An environment that does not let itself be
cancelled is left behind after a while: its episode arrives all the same, and what it still does counts for nothing.
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
from headrace.orchestrator.signals import Arrival, Episode
from headrace.rollout.checks import check_rollout, checked_rollouts
from headrace.rollout.types import Rollout, RolloutError, Task

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Episodes that begin between two looks at what else there is to do: each renders a prompt and opens a connection."""
GRACE = 10.0
"""Seconds that a cancelled episode gets to end before it is left behind."""


class Line(Protocol):
    """How episodes of one environment reach the model."""

    def open(self, session: str, episode: str) -> Context:
        """A line for an episode of this session; all of a session prefer one engine.

        `episode` is a name that it would have again if the run were repeated.
        """
        ...

    def close(self, session: str) -> None:
        """The episode is over."""
        ...


class EpisodeRunner(msgspec.Struct):
    """What it takes to run an episode of one environment; `process` is what happens to a rollout before it arrives."""

    environment: Environment
    line: Line
    timeout: float | None
    process: Callable[[Rollout, Task], Awaitable[None]] | None = None
    text_only: bool = False
    """Whether the line tells no tokens, as that of a server which speaks OpenAI's interface alone."""
    vocab_size: int | None = None
    """Of the model that is trained on what arrives; None: none is."""


class _Running:
    """An episode in flight."""

    def __init__(self, episode: Episode, task: asyncio.Task[list[Rollout]]) -> None:
        self.episode = episode
        self.task = task
        self.started = time.monotonic()
        self.ending: RolloutError | None = None
        """Why we ended it, if we did."""
        self.timer: asyncio.TimerHandle | None = None


class _Door:
    """Lets those who come at once in by a few at a time, so that a thousand episodes do not stall the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._let_in)
        self._waiting.append(turn)
        await turn

    def _let_in(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_in)


class Dispatcher:
    """`runners` by (kind, environment name); `deliver` is called once per started episode."""

    def __init__(
        self,
        runners: dict[tuple[str, str], EpisodeRunner],
        deliver: Callable[[Arrival], None],
        grace: float = GRACE,
    ) -> None:
        self._runners = runners
        self._deliver = deliver
        self._grace = grace
        self._door = _Door()
        self._running: dict[int, _Running] = {}
        self._reported: set[str] = set()

    def start(self, episode: Episode) -> None:
        runner = self._runners[episode.kind, episode.env]
        task = asyncio.create_task(self._run(episode, runner))
        running = self._running[episode.id] = _Running(episode, task)
        if runner.timeout is not None:
            error = RolloutError("timeout", f"the episode took longer than {runner.timeout:g} s")
            running.timer = asyncio.get_running_loop().call_later(runner.timeout, self._end, running, error)
        task.add_done_callback(partial(self._on_end, running))

    def cancel(self, episode: Episode, reason: str) -> None:
        """Stop an episode; it still arrives, as an error with this reason."""
        running = self._running.get(episode.id)
        if running is not None:  # else its arrival is already on the way
            self._end(running, RolloutError(reason))

    def oldest(self) -> tuple[str, float] | None:
        """Environment and age in seconds of the episode that runs longest."""
        if not self._running:
            return None
        running = next(iter(self._running.values()))
        return running.episode.env, time.monotonic() - running.started

    async def close(self) -> None:
        """Cancel whatever still runs and wait until all of it has arrived."""
        left = list(self._running.values())
        for running in left:
            self._end(running, RolloutError("cancelled"))
        if left:
            await asyncio.wait([running.task for running in left], timeout=self._grace)
        for running in left:
            self._leave_behind(running)

    # -- one episode ----------------------------------------------------------------------------------------------

    async def _run(self, episode: Episode, runner: EpisodeRunner) -> list[Rollout]:
        """The episode's rollouts, processed; any failure but cancellation becomes a rollout that says so."""
        await self._door.enter()
        context = runner.line.open(episode.group.id, episode.name)
        try:
            rollouts = checked_rollouts(await runner.environment.run(_own_copy(episode.group.task), context))
        except EngineCallError as error:
            return [self._failed(episode, RolloutError("engine", fault_of(error).text))]
        except EpisodeError as error:
            told = RolloutError(error.reason, fault_of(error).message)
            return [self._failed(episode, told, error.place, error.remote_traceback)]
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # whatever a user's environment raises costs its episode, even sys.exit()
            return [self._fault(episode, "environment", error)]
        finally:
            runner.line.close(episode.group.id)
        for rollout in rollouts:
            _stamp(rollout, episode)
            check_rollout(rollout, runner.environment.scores_groups, runner.text_only, runner.vocab_size)
        try:
            for rollout in rollouts:
                if runner.process is not None:
                    await runner.process(rollout, episode.group.task)
        except Exception as error:  # a user's algorithm, or turns that do not fit together
            return [self._fault(episode, "algorithm", error)]
        for rollout in rollouts:
            if rollout.error is not None:
                self._report(episode, rollout.error)
        return rollouts or [self._failed(episode, RolloutError("empty", "the environment returned no rollout"))]

    def _end(self, running: _Running, error: RolloutError) -> None:
        if running.ending is None:
            running.ending = error
            running.task.cancel()
            self._stop_timer(running)
            loop = asyncio.get_running_loop()
            running.timer = loop.call_later(self._grace, self._leave_behind, running)

    def _leave_behind(self, running: _Running) -> None:
        if running.episode.id in self._running and running.ending is not None:
            log.error(
                "an episode of %s does not end although it was cancelled (%s): it is left behind. An environment must "
                "let CancelledError through and not compute for long on the event loop (workers = N helps)",
                running.episode.env,
                running.ending.reason,
            )
            self._arrive(running, [self._failed(running.episode, running.ending)])

    def _on_end(self, running: _Running, task: asyncio.Task[list[Rollout]]) -> None:
        if running.episode.id not in self._running:  # it was left behind; its arrival is long in
            if not task.cancelled():
                task.exception()
            return
        if running.ending is not None or task.cancelled():
            ending = running.ending or RolloutError("environment", CANCELLED_ITSELF)
            self._arrive(running, [self._failed(running.episode, ending)])
        elif (error := task.exception()) is not None:
            self._arrive(running, [self._fault(running.episode, "environment", error)])
        else:
            self._arrive(running, task.result())

    def _arrive(self, running: _Running, rollouts: list[Rollout]) -> None:
        del self._running[running.episode.id]
        self._stop_timer(running)
        for rollout in rollouts:
            rollout.timings["episode"] = time.monotonic() - running.started
        self._deliver(Arrival(running.episode, rollouts))

    def _stop_timer(self, running: _Running) -> None:
        if running.timer is not None:
            running.timer.cancel()

    # -- failures -------------------------------------------------------------------------------------------------

    def _fault(self, episode: Episode, reason: str, error: BaseException) -> Rollout:
        fault = fault_of(error)
        return self._failed(episode, RolloutError(reason, fault.text), fault.place, fault.traceback)

    def _failed(self, episode: Episode, error: RolloutError, place: str = "", trace: str = "") -> Rollout:
        rollout = Rollout(error=error)
        _stamp(rollout, episode)
        if error.detail:  # what we cancelled ourselves has no story to tell
            self._report(episode, error, place, trace)
        return rollout

    def _report(self, episode: Episode, error: RolloutError, place: str = "", trace: str = "") -> None:
        """The first failure of a kind, or from a place in the code, is told in full; the rest are counted."""
        kind = f"{episode.env} {error.reason} {place}"
        if kind not in self._reported:
            self._reported.add(kind)
            log.error(
                "an episode of %s failed (%s: %s); further failures alike are only counted%s",
                episode.env, error.reason, error.detail, f"\n{trace}" if trace else "",
            )  # fmt: skip


def _stamp(rollout: Rollout, episode: Episode) -> None:
    """Fill in what environments must not know."""
    rollout.env = episode.env
    rollout.task_key = episode.group.task.key
    rollout.group_id = episode.group.id
    rollout.draw_id = episode.group.draw_id
    rollout.episode = episode.index
    rollout.credited = 0


def _own_copy(task: Task) -> Task:
    """For one episode: it may change its data, and others run on the same task."""
    return msgspec.structs.replace(task, data=msgspec.msgpack.decode(msgspec.msgpack.encode(task.data)))
