"""The shell around the pipeline: one queue of events in, the pipeline's actions carried out.

Everything slow (episodes, credit, files, weight updates) runs beside the loop and comes back as an event, so that
intake never stalls. No decision is made here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headrace.inference.schema import Health
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import FIRST_NOTICE, Status
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.drift import Drift, Report, truncation
from headrace.orchestrator.eval_metrics import failure_notice
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
    Reported,
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
from headrace.transport.journal import Entries, Journal
from headrace.transport.rollout_files import write_eval_rollouts, write_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir

log = logging.getLogger(__name__)

MAX_CONCURRENT = 32
"""Groups of one environment in processing at once."""
GRACE = 5.0
"""Seconds that work beside the loop gets to end before it is left behind."""
COLLECT_RARELY = (50_000, 10, 10)
"""Thresholds of the garbage collector. Episodes leave next to no cycles behind, and at the usual thresholds it walks
through all that is in flight again and again: an eighth of the CPU, and pauses of a third of a second."""


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
        drift: Drift,
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
        self.drift = drift
        self.keep_rollouts = keep_rollouts
        self.metrics = MetricsLog(run.metrics, "orchestrator")
        self.periodic = PeriodicLogger(log_loop_interval, pipeline.gauges, self._log_gauges)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(runners, self.events.put_nowait)
        self._slots: defaultdict[tuple[Kind, str], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_CONCURRENT)
        )
        self._background: set[asyncio.Task[None]] = set()
        # One thread: the journal's connection is used by one caller at a time, in order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._disk_failed = False
        """Entries have left the ledger and are not in the journal: nothing later may be committed."""
        self._saving_eval = asyncio.Lock()
        """Environments that are evaluated at one version share a file."""
        self._told_failures: set[str] = set()
        """Evaluation environments of which too many episodes failed."""
        self._waiting = Waiting(status)

    async def run(self) -> bool:
        """Until the last step is shipped, its weights are loaded and every evaluation has closed; or until stopped.

        Returns whether the run is over, rather than stopped.
        """
        self._loop = asyncio.get_running_loop()
        self._spawn(self.watcher.follow(self._on_published, self._on_reports))
        self._spawn(self.periodic.run())
        self._log_drift(self.drift.follow(self.pipeline.version))
        usual = gc.get_threshold()
        gc.set_threshold(*COLLECT_RARELY)
        try:
            self._perform(self.pipeline.start(time.monotonic()))
            while not self.pipeline.finished:
                event = await self._next_event()
                self._perform(self.pipeline.handle(event, time.monotonic()))
            if not self.pipeline.stopped:
                await self.drift.settle(GRACE)
            else:
                log.info("stopping: %d steps shipped; a resumed run continues from here", self.pipeline.step - 1)
            return not self.pipeline.stopped
        finally:
            gc.set_threshold(*usual)
            await self._close()

    def stop(self) -> None:
        self.events.put_nowait(Stop())

    async def _next_event(self) -> Event:
        if not self.events.empty():
            return self.events.get_nowait()
        wake_at = self.pipeline.wake_at
        if wake_at is None:
            return await self.events.get()
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
                    self._write(partial(self._ship, action), Shipped(action.step))
                case Commit():
                    self._write(partial(self.journal.commit, action.entries))
                case Load():
                    self._spawn(self._load(action.version))
                case ReportEval():
                    self._write(partial(self._report_eval, action.batch))
        self.status.set(self.pipeline.activity)
        if self.pipeline.collected is not None:
            self.status.advance(*self.pipeline.collected)
        self.status.set_problem(self.pipeline.problem)

    async def _process_group(self, action: ProcessGroup) -> None:
        levels = self.processing if action.kind is Kind.TRAIN else self.eval_processing
        async with self._slots[action.kind, action.group.task.env]:
            scored = await levels.process_group(action.group, action.rollouts)
            self.events.put_nowait(GroupDone(scored))

    async def _process_batch(self, batch: TrainBatch | EvalBatch) -> None:
        if isinstance(batch, TrainBatch):
            await self.processing.process_batch(batch)
        else:
            await self.eval_processing.process_batch(batch)
            async with self._saving_eval:  # not on the disk's thread: a batch must not wait for it
                await asyncio.to_thread(self._save_eval, batch)
        self.events.put_nowait(BatchDone(batch))

    async def _load(self, version: Version) -> None:
        version = await self.watcher.load(version)
        self.events.put_nowait(Loaded(version))
        self._log_drift(self.drift.follow(version))
        self._write(self._mark_trained)

    def _ship(self, ship: Ship) -> None:
        """Files, journal, announcement: in this order, so that they agree whatever is killed when.

        A step that is killed before its commit is made anew, and its files and records with it.
        """
        step, batch = ship.step, ship.batch
        started = time.monotonic()
        self.run_dir.batches.prepare(_record(ship))
        write_rollouts(self.run_dir.rollouts, step, batch.kept, ship.dropped, self.keep_rollouts)
        samples = (sample for rollout in batch.kept for sample in rollout.samples)
        values = {**step_metrics(step, batch), **truncation(samples), **ship.metrics}
        values["time/write_batch"] = time.monotonic() - started
        self.metrics.log(step, values)
        self.journal.commit(ship.entries, shipped=step)
        self.run_dir.batches.announce(step)
        log.info(
            "step %d shipped: reward %.3f, %d of %d rollouts, %.1f s",
            step, values["reward/all/mean"], len(batch.kept), len(batch.rollouts), values["time/batch"],
        )  # fmt: skip

    def _save_eval(self, batch: EvalBatch) -> None:
        """Before its metrics are recorded: an evaluation that is killed in between is made again, and replaces it."""
        directory, step = self.run_dir.rollouts, batch.version.step
        write_eval_rollouts(RolloutKind.EVAL.path(directory, step), step, batch.rollouts)
        RolloutKind.EVAL.delete_old(directory, self.keep_rollouts)

    def _report_eval(self, batch: EvalBatch) -> None:
        version = batch.version
        self.metrics.log(version.step, {**batch.metrics, "eval/incarnation": version.incarnation})
        scores = {name.split("/")[-1]: value for name, value in batch.metrics.items() if "@" in name}
        words = ", ".join(f"{name} {value:.4g}" for name, value in sorted(scores.items()))
        took = time.monotonic() - batch.opened_at
        log.info("evaluated %s at version %d in %.1f s: %s", batch.env, version.step, took, words or "no score")
        if notice := failure_notice(batch):
            self._tell_failures(batch.env, notice)

    def _tell_failures(self, env: str, notice: str) -> None:
        """On the terminal once per environment: the log has every evaluation."""
        if env in self._told_failures:
            log.warning("%s", notice)
        else:
            self._told_failures.add(env)
            self.status.notify(notice)

    # -- beside the loop ------------------------------------------------------------------------------------------

    def _on_published(self, version: Version) -> None:
        self.events.put_nowait(Published(version))

    def _on_reports(self, engines: dict[str, Health]) -> None:
        self.events.put_nowait(Reported(engines))

    def _log_gauges(self, values: dict[str, float]) -> None:
        self._write(partial(self.metrics.log, self.pipeline.position, values))
        self.status.set(None, **values)
        what, whom = self.pipeline.awaited()
        oldest = self.dispatcher.oldest()
        story = ""
        if oldest is not None:
            story = f" (the oldest episode in flight, of {oldest[0]}, has been running for {oldest[1]:.0f} s)"
        self._waiting.look(f"{what} from {whom}", self.pipeline.progress, story)

    def _log_drift(self, report: Report | None) -> None:
        if report is not None:
            self._write(partial(self.metrics.log, *report))

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

    def _write(self, work: Callable[[], None], then: Event | None = None) -> None:
        """Hand work to the disk, in order, at once: what has left the ledger is never dropped on the way."""

        def write() -> None:
            if self._disk_failed:  # a later commit would leave a hole; all of it is drawn again instead
                return
            try:
                work()
            except BaseException as error:
                self._disk_failed = True
                self._loop.call_soon_threadsafe(self.events.put_nowait, Failed(error))
            else:
                if then is not None:
                    self._loop.call_soon_threadsafe(self.events.put_nowait, then)

        self._disk.submit(write)

    async def _close(self) -> None:
        """Commit what is known, then cancel what runs; what is open is drawn again. Ends within a bounded time."""
        now = time.monotonic()
        if self.pipeline.has_lost_entries:  # an error came between a decision and its being carried out
            self._disk_failed = True
        entries, progress = self.pipeline.buffer.take_entries(now), self.pipeline.buffer.progress(now)
        self._write(partial(self._commit_at_end, entries, progress))
        self._log_drift(self.drift.end())
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=GRACE)
        await self.dispatcher.close()
        await asyncio.to_thread(self._disk.shutdown)

    def _commit_at_end(self, entries: Entries, progress: dict[str, float]) -> None:
        """What was dropped since the last step, and the totals with it."""
        self.journal.commit(entries)
        if self.pipeline.trains:
            self.metrics.log(self.journal.last_step(), progress)
        if self.pipeline.finished and not self.pipeline.stopped:
            self.journal.drop_open("max_steps")
        self._mark_trained()


class Waiting:
    """Says what is awaited from whom once nothing has moved for a minute, then at growing intervals."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._subject: object = None
        self._since = time.monotonic()
        self._next_notice = FIRST_NOTICE
        self._shown: int | None = None

    def look(self, what: str, progress: object, story: str) -> None:
        """`progress` is anything that changes when the run gets further; `story` is told along."""
        subject = (what, progress)
        if subject != self._subject:
            if self._shown is not None:
                self._status.end_wait(self._shown)
            self._shown = self._status.begin_wait(what)
            self._subject, self._since, self._next_notice = subject, time.monotonic(), FIRST_NOTICE
            return
        waited = time.monotonic() - self._since
        if waited > self._next_notice:
            log.warning("has been waiting for %s for %.0f s%s", what, waited, story)
            self._next_notice = 2 * waited


def _record(ship: Ship) -> Batch:
    rollouts: list[Rollout] = ship.batch.kept
    samples = [
        BatchSample(sample, rollout.env, index) for index, rollout in enumerate(rollouts) for sample in rollout.samples
    ]
    draws = list(dict.fromkeys(rollout.draw_id for rollout in rollouts))
    return Batch(ship.step, ship.incarnation, samples, draws, {"rollouts": len(rollouts), "samples": len(samples)})
