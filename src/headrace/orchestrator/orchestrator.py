"""The event loop around the pipeline: passes events to it and performs its actions.

Everything slow (episodes, credit, files, weight updates) runs in the background and returns as an event, so new
rollouts are never delayed. All decisions are in the pipeline.
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

from headrace.observe.metrics import MetricsLog
from headrace.observe.status import FIRST_NOTICE_S, Status
from headrace.orchestrator import signals
from headrace.orchestrator.batch_metrics import failure_notice, step_histograms, step_metrics
from headrace.orchestrator.commits import Commits
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.drift import Drift, DriftReport, truncation_metrics
from headrace.orchestrator.event_loop import measure_lag
from headrace.orchestrator.pipeline import Pipeline
from headrace.orchestrator.processing import EvalProcessing, TrainProcessing
from headrace.orchestrator.signals import EvalBatch, Kind, TrainBatch
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.batch import batch_of
from headrace.rollout.version import Version
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Entries
from headrace.transport.rollout_files import write_eval_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir

log = logging.getLogger(__name__)

MAX_CONCURRENT_GROUPS = 32
"""Groups of one environment in processing at once."""
CANCEL_GRACE_S = 5.0
"""Time that background work gets to end before it is abandoned."""
GC_THRESHOLDS = (50_000, 10, 10)
"""Thresholds of the garbage collector. Episodes leave almost no reference cycles, and with the default thresholds the
collector scans everything in flight again and again: an eighth of the CPU, and pauses of a third of a second."""


class Orchestrator:
    """Runs the pipeline of a run: performs its actions and returns their results as events."""

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
        self.pipeline, self.run_dir, self.journal, self.status = pipeline, run, journal, status
        self.processing, self.eval_processing = processing, eval_processing
        self.watcher, self.drift = watcher, drift
        self.log_loop_interval, self.keep_rollouts = log_loop_interval, keep_rollouts
        self.commits = Commits(run, journal, keep_rollouts)
        self.metrics = MetricsLog(run.metrics, "orchestrator")
        self.events: asyncio.Queue[signals.Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(runners, self.events.put_nowait)
        self._slots: defaultdict[tuple[Kind, str], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_CONCURRENT_GROUPS)
        )
        self._background: set[asyncio.Task[None]] = set()
        # One thread: the journal's connection has one user at a time, and writes keep their order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._disk_failed = False
        """Whether entries taken from the journal buffer were not written: then nothing later may be committed."""
        self._saving_eval = asyncio.Lock()
        """Evaluations at one version share a file."""
        self._notified_failures: set[str] = set()
        """Evaluation environments whose failures were shown on the terminal."""
        self._stalls = StallMonitor(status)

    async def run(self) -> bool:
        """Run until the last step is shipped, its weights are loaded and its evaluations reported, or until stopped.

        Return whether the run is complete, rather than stopped.
        """
        self._loop = asyncio.get_running_loop()
        put = self.events.put_nowait
        follow = self.watcher.follow(
            lambda version: put(signals.Published(version)), lambda engines: put(signals.Reported(engines))
        )
        self._spawn(follow)
        self._spawn(measure_lag(self.log_loop_interval, self._log_gauges))
        self._log_drift(self.drift.follow(self.pipeline.version))
        thresholds = gc.get_threshold()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            self._perform(self.pipeline.start(time.monotonic()))
            while not self.pipeline.finished:
                event = await self._next_event()
                self._perform(self.pipeline.handle(event, time.monotonic()))
            if not self.pipeline.stopped:
                await self.drift.wait_for_requests(CANCEL_GRACE_S)
            else:
                log.info("stopping: %d steps shipped; a resumed run continues from here", self.pipeline.step - 1)
            return not self.pipeline.stopped
        finally:
            gc.set_threshold(*thresholds)
            await self._close()

    def stop(self) -> None:
        self.events.put_nowait(signals.Stop())

    async def _next_event(self) -> signals.Event:
        if not self.events.empty():
            return self.events.get_nowait()
        wake_at = self.pipeline.wake_at
        if wake_at is None:
            return await self.events.get()
        try:
            async with asyncio.timeout(wake_at - time.monotonic()):
                return await self.events.get()
        except TimeoutError:
            return signals.Tick()

    # -- actions --------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[signals.Action]) -> None:
        for action in actions:
            match action:
                case signals.RunEpisode():
                    self.dispatcher.start(action.episode)
                case signals.CancelEpisode():
                    self.dispatcher.cancel(action.episode, action.reason)
                case signals.ProcessGroup():
                    self._spawn(self._process_group(action))
                case signals.ProcessBatch():
                    self._spawn(self._process_batch(action.batch))
                case signals.Ship():
                    self._write(partial(self._ship, action), signals.Shipped(action.step))
                case signals.Commit():
                    self._write(partial(self.commits.commit, action.entries))
                case signals.Load():
                    self._spawn(self._load(action.version))
                case signals.ReportEval():
                    self._write(partial(self._report_eval, action.batch))
        self.status.set(self.pipeline.activity)
        if self.pipeline.collected is not None:
            self.status.advance(*self.pipeline.collected)
        self.status.set_problem(self.pipeline.problem)

    async def _process_group(self, action: signals.ProcessGroup) -> None:
        processing = self.processing if action.kind is Kind.TRAIN else self.eval_processing
        async with self._slots[action.kind, action.group.task.env]:
            scored = await processing.process_group(action.group, action.rollouts)
            self.events.put_nowait(signals.GroupDone(scored))

    async def _process_batch(self, batch: TrainBatch | EvalBatch) -> None:
        if isinstance(batch, TrainBatch):
            await self.processing.process_batch(batch)
        else:
            await self.eval_processing.process_batch(batch)
            async with self._saving_eval:  # not on the disk thread: training batches must not wait for it
                await asyncio.to_thread(self._save_eval, batch)
        self.events.put_nowait(signals.BatchDone(batch))

    async def _load(self, version: Version) -> None:
        version = await self.watcher.load(version)
        self.events.put_nowait(signals.Loaded(version))
        self._log_drift(self.drift.follow(version))
        self._write(self._mark_trained)

    def _ship(self, ship: signals.Ship) -> None:
        """Write the step. If it is killed before its commit, it is repeated, and replaces its files and records."""
        step, batch = ship.step, ship.batch
        started = time.monotonic()
        content = batch_of(step, ship.incarnation, batch.kept)
        prepared = self.commits.prepare(content, batch.kept, ship.entries.dropped)
        truncations = truncation_metrics(entry.sample for entry in content.samples)
        values = {**step_metrics(step, batch), **truncations, **ship.metrics}
        values["time/write_batch"] = time.monotonic() - started
        self.metrics.log(step, {**values, **step_histograms(batch)})
        self.commits.ship(prepared, ship.entries)
        log.info(
            "step %d shipped: reward %.3f, %d of %d rollouts, %.1f s",
            step, values["reward/all/mean"], len(batch.kept), len(batch.rollouts), values["time/batch"],
        )  # fmt: skip

    def _save_eval(self, batch: EvalBatch) -> None:
        """Write an evaluation's rollouts, before its metrics: if killed in between, a repetition replaces them."""
        directory, step = self.run_dir.rollouts, batch.version.step
        write_eval_rollouts(RolloutKind.EVAL.path(directory, step), step, batch.rollouts)
        for path in RolloutKind.EVAL.old_files(directory, self.keep_rollouts):
            path.unlink()

    def _report_eval(self, batch: EvalBatch) -> None:
        version = batch.version
        self.metrics.log(version.step, {**batch.metrics, "eval/incarnation": version.incarnation})
        scores = {name.split("/")[-1]: value for name, value in batch.metrics.items() if "@" in name}
        text = ", ".join(f"{name} {value:.4g}" for name, value in sorted(scores.items()))
        seconds = time.monotonic() - batch.opened_at
        log.info("evaluated %s at version %d in %.1f s: %s", batch.env, version.step, seconds, text or "no score")
        if notice := failure_notice(batch):
            if batch.env in self._notified_failures:  # on the terminal once per environment
                log.warning("%s", notice)
            else:
                self._notified_failures.add(batch.env)
                self.status.notify(notice)

    # -- background work ------------------------------------------------------------------------------------------

    def _log_gauges(self, lag: dict[str, float]) -> None:
        values = {**self.pipeline.gauges(), **lag}
        self._write(partial(self.metrics.log, self.pipeline.position, values))
        oldest, detail = self.dispatcher.oldest(), ""
        if oldest is not None:
            detail = f" (the oldest episode in flight, of {oldest[0]}, has been running for {oldest[1]:.0f} s)"
        env, seconds = oldest or (None, 0.0)
        self.status.set(None, **values, oldest_episode_env=env, oldest_episode_s=round(seconds, 1))
        self._stalls.check(" from ".join(self.pipeline.awaited()), self.pipeline.progress, detail)

    def _log_drift(self, report: DriftReport | None) -> None:
        if report is not None:
            self._write(partial(self.metrics.log, *report))

    def _mark_trained(self) -> None:
        self.journal.mark_trained(self.run_dir.latest_checkpoint_step())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; an error of it is an event that ends the run."""

        def on_done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.events.put_nowait(signals.Failed(error))

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(on_done)

    def _write(self, work: Callable[[], None], then: signals.Event | None = None) -> None:
        """Queue work for the disk thread, in order, so entries taken from the journal buffer are never lost."""

        def write() -> None:
            if self._disk_failed:  # a later commit would leave a gap; those draws are sampled again instead
                return
            try:
                work()
            except BaseException as error:
                self._disk_failed = True
                self._loop.call_soon_threadsafe(self.events.put_nowait, signals.Failed(error))
            else:
                if then is not None:
                    self._loop.call_soon_threadsafe(self.events.put_nowait, then)

        self._disk.submit(write)

    async def _close(self) -> None:
        """Commit the final outcomes, then cancel the work in flight, within a bounded time. Open draws are repeated."""
        now = time.monotonic()
        if self.pipeline.has_lost_entries:
            self._disk_failed = True
        entries, progress = self.pipeline.buffer.take_entries(now), self.pipeline.buffer.progress(now)
        self._write(partial(self._commit_at_end, entries, progress))
        self._log_drift(self.drift.end())
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=CANCEL_GRACE_S)
        await self.dispatcher.close()
        await asyncio.to_thread(self._disk.shutdown)

    def _commit_at_end(self, entries: Entries, progress: dict[str, float]) -> None:
        """Commit what was dropped since the last step, and record the totals."""
        self.commits.commit(entries)
        if self.pipeline.trains:
            self.metrics.log(self.journal.last_step(), progress)
        if self.pipeline.finished and not self.pipeline.stopped:
            self.journal.drop_open("max_steps")
        self._mark_trained()


class StallMonitor:
    """Shows what the run waits for, and logs it after a minute without progress, then at growing intervals."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._subject: object = None
        self._since = time.monotonic()
        self._next_notice = FIRST_NOTICE_S
        self._shown: int | None = None

    def check(self, what: str, progress: object, detail: str) -> None:
        """Compare with the last call. `progress` changes when the run advances; `detail` is added to the log line."""
        subject = (what, progress)
        if subject != self._subject:
            if self._shown is not None:
                self._status.end_wait(self._shown)
            self._shown = self._status.begin_wait(what)
            self._subject, self._since, self._next_notice = subject, time.monotonic(), FIRST_NOTICE_S
            return
        waited = time.monotonic() - self._since
        if waited > self._next_notice:
            log.warning("has been waiting for %s for %.0f s%s", what, waited, detail)
            self._next_notice = 2 * waited
