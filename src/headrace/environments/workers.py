"""An environment whose episodes run in worker processes, so that this process's event loop only moves data.

Rendering and sampling stay in this process. An episode is not moved to another worker when its own dies: what it had
sampled is lost, so it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.environments.base import Context, Demonstration, Environment, EpisodeError
from headrace.environments.channel import decoder
from headrace.environments.worker import Scores
from headrace.environments.worker_process import WorkerLimits, WorkerProcess
from headrace.errors import Failure
from headrace.rollout.types import Rollout, Task

log = logging.getLogger(__name__)

MIN_RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 30.0
"""The delay before a worker is restarted doubles each time one dies without having finished a job."""
MAX_FAILED_STARTS = 3
"""Workers that may die so in a row before the waiting episodes fail."""

_rollouts = decoder(list[Rollout])
_scores = decoder(list[Scores])


class WorkersFailed(Failure):
    """The environment loads in this process but does not start in a worker process."""


class WorkerPool(Environment):
    """Runs episodes in `size` worker processes, which load the environment from `identifier` and `args`.

    `environment` is the instance in this process.
    """

    def __init__(
        self,
        environment: Environment,
        identifier: str,
        args: dict[str, Any],
        *,
        size: int,
        limits: WorkerLimits | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, not {size}")
        self._environment = environment
        self._identifier = identifier
        self._args = args
        self._size = size
        self._limits = limits or WorkerLimits()
        self._workers: list[WorkerProcess] = []
        """Workers that are starting, running or draining."""
        self._keepers: list[asyncio.Task[None]] = []
        self._waiting: set[asyncio.Future[str]] = set()
        self._reported: set[str] = set()

    def tasks(self) -> Iterable[dict[str, Any]]:
        return self._environment.tasks()

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return self._environment.thinking_tags(task)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        return self._environment.demonstrations(seed)

    @property
    def scores_groups(self) -> bool:
        return self._environment.scores_groups

    async def start(self) -> None:
        """Start all workers; if one fails, close them all and raise."""
        workers = [self._new_worker() for _ in range(self._size)]
        try:
            await asyncio.gather(*(worker.start() for worker in workers))
            for worker in workers:
                if not worker.ready:
                    self._report_refusal(worker)
                    raise WorkersFailed(f"a worker process of environment {self._identifier!r} {worker.cause}")
        except BaseException:
            await self.close()
            raise
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in workers]

    async def close(self) -> None:
        """End all workers; episodes that still run fail."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        ends = await asyncio.gather(*keepers, return_exceptions=True)
        self._wake_waiting("the worker pool was closed")
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        for end in ends:
            if isinstance(end, Exception):  # a bug: keepers end by cancellation
                raise end

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        worker = await self._least_busy()
        rollouts: list[Rollout] = await worker.ask("run", task, _rollouts, context)
        return rollouts

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        worker = await self._least_busy()
        scores: list[Scores] = await worker.ask("score", list(rollouts), _scores)
        for rollout, changed in zip(rollouts, scores, strict=True):
            rollout.rewards, rollout.metrics, rollout.error = changed.rewards, changed.metrics, changed.error

    async def _least_busy(self) -> WorkerProcess:
        """Wait for a ready worker and return the one with the fewest jobs."""
        while not (ready := [worker for worker in self._workers if worker.ready]):
            if all(keeper.done() for keeper in self._keepers):
                raise RuntimeError("the worker pool is not running: call start() first")
            wakeup: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._waiting.add(wakeup)
            try:
                if error := await wakeup:
                    raise EpisodeError("worker", error)
            finally:
                self._waiting.discard(wakeup)
        return min(ready, key=lambda worker: len(worker.jobs))

    def _wake_waiting(self, error: str = "") -> None:
        """Wake the episodes that wait for a worker; with an `error`, they fail."""
        for wakeup in self._waiting:
            if not wakeup.done():
                wakeup.set_result(error)

    async def _keep(self, worker: WorkerProcess) -> None:
        """Replace a worker whenever it leaves the pool."""
        failures, delay = 0, MIN_RESTART_DELAY_S
        while True:
            await worker.left.wait()
            if worker.retired or worker.finished:
                failures, delay = 0, MIN_RESTART_DELAY_S
            else:
                failures += 1
                self._report_refusal(worker)
                if failures >= MAX_FAILED_STARTS:
                    text = f"{failures} worker processes in a row ended without a finished job; the last {worker.cause}"
                    self._wake_waiting(text)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RESTART_DELAY_S)
            worker = self._new_worker()
            await worker.start()
            if worker.ready:
                self._wake_waiting()

    def _new_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._identifier, self._args, self._limits)
        self._workers = [*(other for other in self._workers if not other.ended), worker]
        return worker

    def _report_refusal(self, worker: WorkerProcess) -> None:
        if worker.refusal and worker.refusal not in self._reported:
            self._reported.add(worker.refusal)
            log.error("a worker process cannot load %s:\n%s", self._identifier, worker.refusal.rstrip())
