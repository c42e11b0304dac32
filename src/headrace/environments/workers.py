"""An environment whose episodes run in worker processes, so that the event loop here only moves data.

Episodes talk to the model through this process: rendering and sampling stay here. Left out: moving an episode to
another worker when its own dies. What it had sampled is lost with it, so it fails, and its draw is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from headrace.environments.base import Context, Demonstration, Environment, EpisodeError
from headrace.environments.channel import Run, Score, Scores, decoder
from headrace.environments.worker_process import WorkerLimits, WorkerProcess
from headrace.errors import Failure
from headrace.rollout.types import Rollout, Task

log = logging.getLogger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 30.0
"""Seconds before a worker is started again, doubled each time one dies without having done anything."""
PATIENCE = 3
"""Workers that may die so before the episodes that wait for one are failed."""

_rollouts = decoder(list[Rollout])
_scores = decoder(list[Scores])


class WorkersFailed(Failure):
    """The environment, which loads here, does not start in a worker process."""


class WorkerPool(Environment):
    """`environment` is the instance in this process, loaded from the same `identifier` and `args` as the workers'."""

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
        """Those that work, start or drain."""
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
        """Until every worker is ready; if one is not, none is left."""
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
        """End every worker; episodes that still run fail."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        ends = await asyncio.gather(*keepers, return_exceptions=True)
        self._tell_waiting("the worker pool was closed")
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        for end in ends:
            if isinstance(end, Exception):  # of our own code: cancelled is how a keeper ends
                raise end

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        worker = await self._least_busy()
        rollouts: list[Rollout] = await worker.ask(partial(Run, task=task), _rollouts, context)
        return rollouts

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        worker = await self._least_busy()
        scores: list[Scores] = await worker.ask(partial(Score, rollouts=list(rollouts)), _scores)
        for rollout, changed in zip(rollouts, scores, strict=True):
            rollout.rewards, rollout.metrics, rollout.error = changed.rewards, changed.metrics, changed.error

    async def _least_busy(self) -> WorkerProcess:
        """The ready worker with the fewest jobs, once there is one."""
        while not (ready := [worker for worker in self._workers if worker.ready]):
            if all(keeper.done() for keeper in self._keepers):
                raise RuntimeError("the worker pool is not running: start() comes first")
            news: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._waiting.add(news)
            try:
                if bad_news := await news:
                    raise EpisodeError("worker", bad_news)
            finally:
                self._waiting.discard(news)
        return min(ready, key=lambda worker: len(worker.jobs))

    def _tell_waiting(self, bad_news: str) -> None:
        """Have those that wait for a worker look again, or fail."""
        for news in self._waiting:
            if not news.done():
                news.set_result(bad_news)

    async def _keep(self, worker: WorkerProcess) -> None:
        """One place in the pool: when its worker leaves, another comes."""
        failures, delay = 0, FIRST_DELAY
        while True:
            await worker.left.wait()
            if worker.retired or worker.finished:
                failures, delay = 0, FIRST_DELAY
            else:
                failures += 1
                self._report_refusal(worker)
                if failures >= PATIENCE:
                    text = f"{failures} worker processes in a row did nothing; the last {worker.cause}"
                    self._tell_waiting(text)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)
            worker = self._new_worker()
            await worker.start()
            if worker.ready:
                self._tell_waiting("")

    def _new_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._identifier, self._args, self._limits)
        self._workers = [*(other for other in self._workers if not other.ended), worker]
        return worker

    def _report_refusal(self, worker: WorkerProcess) -> None:
        if worker.refusal and worker.refusal not in self._reported:
            self._reported.add(worker.refusal)
            log.error("a worker process cannot load %s:\n%s", self._identifier, worker.refusal.rstrip())
