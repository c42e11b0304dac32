"""The shell around the pipeline: one queue of events in, the pipeline's actions carried out.

Everything slow (episodes, credit, files, weight updates) runs beside the loop and comes back as an event, so that
intake never stalls. No decision is made here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_for
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.dump import write_rollouts
from headrace.orchestrator.journal import Entries, Journal
from headrace.orchestrator.periodic import PeriodicLogger
from headrace.orchestrator.pipeline import Pipeline
from headrace.orchestrator.processing import EvalProcessing, TrainProcessing
from headrace.orchestrator.signals import (
    Action,
    BatchDone,
    CancelEpisode,
    Commit,
    EvalBatch,
    Event,
    Failed,
    GroupDone,
    Kind,
    Load,
    Loaded,
    ProcessBatch,
    ProcessGroup,
    Published,
    ReportEval,
    RunEpisode,
    Ship,
    Shipped,
    Stop,
    Tick,
    TrainBatch,
)
from headrace.orchestrator.step_metrics import step_metrics
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.types import Rollout
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

MAX_CONCURRENT = 32
"""Groups and batches in processing at once."""


class Orchestrator:
    """Owns what a run needs beside its decisions."""

    def __init__(
        self,
        pipeline: Pipeline,
        run: RunDir,
        processing: TrainProcessing,
        eval_processing: EvalProcessing,
        runners: dict[tuple[str, str], EpisodeRunner],
        watcher: WeightWatcher,
        journal: Journal,
        status: Status,
        *,
        log_loop_interval: float,
        keep_rollouts: int,
    ) -> None:
        self.pipeline = pipeline
        self.run_dir = run
        self.processing = processing
        self.eval_processing = eval_processing
        self.watcher = watcher
        self.journal = journal
        self.status = status
        self.keep_rollouts = keep_rollouts
        self.metrics = MetricsLog(run.metrics, "orchestrator")
        self.periodic = PeriodicLogger(log_loop_interval, pipeline.gauges, self._log_gauges)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(runners, self.events.put_nowait)
        self._processing_slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._background: set[asyncio.Task[None]] = set()
        # One thread: the journal's connection is used by one caller at a time, in order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._disk_failed = False
        """Entries have left the ledger and are not in the journal: nothing later may be committed."""

    async def run(self) -> None:
        """Until the last step is shipped, its weights are loaded and every evaluation has closed; or until stopped."""
        self._spawn(self.watcher.follow(self._on_published))
        self._spawn(self.periodic.run())
        try:
            self._perform(self.pipeline.start(time.monotonic()))
            while not self.pipeline.finished:
                event = await self._next_event()
                self._perform(self.pipeline.handle(event, time.monotonic()))
            if self.pipeline.stopped:
                log.info("stopping: %d steps shipped; a resumed run continues from here", self.pipeline.step - 1)
        finally:
            await self._close()

    def stop(self) -> None:
        self.events.put_nowait(Stop())

    async def _next_event(self) -> Event:
        if not self.events.empty():
            return self.events.get_nowait()
        wake_at = self.pipeline.wake_at
        if wake_at is None:
            return await wait_for(self.events.get(), *self.pipeline.awaited(), self.status)
        try:
            async with asyncio.timeout(wake_at - time.monotonic()):
                return await self.events.get()
        except TimeoutError:
            return Tick()

    # -- actions --------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RunEpisode():
                    self.dispatcher.start(action.episode)
                case CancelEpisode():
                    self.dispatcher.cancel(action.episode, action.reason)
                case ProcessGroup():
                    self._spawn(self._process_group(action))
                case ProcessBatch():
                    self._spawn(self._process_batch(action.batch))
                case Ship():
                    self._spawn(self._ship(action))
                case Commit():
                    self._spawn(self._on_disk(partial(self.journal.commit, action.entries)))
                case Load():
                    self._spawn(self._load(action.version))
                case ReportEval():
                    self._report_eval(action.batch)
        last = self.pipeline.step > self.pipeline.settings.max_steps
        self.status.set("every batch is shipped" if last else f"collecting batch {self.pipeline.step}")

    async def _process_group(self, action: ProcessGroup) -> None:
        levels = self.processing if action.kind is Kind.TRAIN else self.eval_processing
        async with self._processing_slots:
            scored = await levels.process_group(action.group, action.rollouts)
            self.events.put_nowait(GroupDone(scored))

    async def _process_batch(self, batch: TrainBatch | EvalBatch) -> None:
        async with self._processing_slots:
            if isinstance(batch, TrainBatch):
                await self.processing.process_batch(batch)
            else:
                await self.eval_processing.process_batch(batch)
        self.events.put_nowait(BatchDone(batch))

    async def _load(self, version: Version) -> None:
        await self.watcher.load(version)
        self.events.put_nowait(Loaded(version))
        await self._on_disk(self._mark_trained)

    async def _ship(self, ship: Ship) -> None:
        """Files, journal, announcement: in this order, so that they agree whatever is killed when.

        A step that is killed before its commit is made anew, and its files and records with it.
        """
        step, batch = ship.step, ship.batch
        values: dict[str, float] = {}

        def write() -> None:
            started = time.monotonic()
            self.run_dir.batches.prepare(_record(ship))
            write_rollouts(self.run_dir.rollouts, step, batch.kept, ship.dropped, self.keep_rollouts)
            values.update(step_metrics(step, batch), **ship.metrics)
            values["time/write_batch"] = time.monotonic() - started
            self.metrics.log(step, values)
            self.journal.commit(ship.entries, shipped=step)
            self.run_dir.batches.announce(step)

        await self._on_disk(write)
        self.events.put_nowait(Shipped(step))
        log.info(
            "step %d shipped: reward %.3f, %d of %d rollouts, %.1f s",
            step, values["reward/all/mean"], len(batch.kept), len(batch.rollouts), values["time/step"],
        )  # fmt: skip

    def _report_eval(self, batch: EvalBatch) -> None:
        self.metrics.log(batch.version, batch.metrics)
        scores = {name.split("/")[-1]: value for name, value in batch.metrics.items() if "@" in name}
        words = ", ".join(f"{name} {value:.4g}" for name, value in sorted(scores.items()))
        log.info("evaluated %s at version %d: %s", batch.env, batch.version, words or "every episode failed")

    # -- beside the loop ------------------------------------------------------------------------------------------

    def _on_published(self, version: Version) -> None:
        self.events.put_nowait(Published(version))

    def _log_gauges(self, values: dict[str, float]) -> None:
        self.metrics.log(self.pipeline.step - 1, values)
        self.status.set(None, **values)

    def _mark_trained(self) -> None:
        covered = self.run_dir.latest_checkpoint_step()
        if covered:
            self.journal.mark_trained(covered)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the loop; a failure comes back as an event and ends the run."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.events.put_nowait(Failed(error))

    async def _on_disk(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, self._write, work)

    def _write(self, work: Callable[[], None]) -> None:
        if self._disk_failed:  # a later commit would leave a hole; all of it is drawn again instead
            return
        try:
            work()
        except BaseException:
            self._disk_failed = True
            raise

    async def _close(self) -> None:
        """Cancel what runs, commit what is known, and leave the rest to be drawn again."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.dispatcher.close()
        now = time.monotonic()
        entries, progress = self.pipeline.ledger.take(now), self.pipeline.ledger.progress(now)
        await self._on_disk(lambda: self._commit_at_end(entries, progress))
        self._disk.shutdown()

    def _commit_at_end(self, entries: Entries, progress: dict[str, float]) -> None:
        """What was dropped since the last step, and the totals with it."""
        self.journal.commit(entries)
        self.metrics.log(self.journal.last_step(), progress)
        if self.pipeline.finished and not self.pipeline.stopped:
            self.journal.drop_open("max_steps")
        self._mark_trained()


def _record(ship: Ship) -> Batch:
    rollouts: list[Rollout] = ship.batch.kept
    samples = [
        BatchSample(sample, rollout.env, index) for index, rollout in enumerate(rollouts) for sample in rollout.samples
    ]
    draws = list(dict.fromkeys(rollout.draw_id for rollout in rollouts))
    return Batch(ship.step, ship.incarnation, samples, draws, {"rollouts": len(rollouts), "samples": len(samples)})
