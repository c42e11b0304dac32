"""The main loop: one queue of events, one handler each, and what may happen next decided after every event.

Events are arrivals of episodes, groups whose credit is known, batches that have been shipped, new policy versions, and
failures of background work. Everything slow (episodes, credit, files, weight updates) runs beside the loop and comes
back as an event, so that intake never stalls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headrace.errors import Failure
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import Status, wait_for
from headrace.orchestrator.dispatcher import Arrival, Dispatcher, EpisodeRunner
from headrace.orchestrator.dump import write_rollouts
from headrace.orchestrator.evaluation import EvalSink, EvalSource
from headrace.orchestrator.journal import Journal
from headrace.orchestrator.ledger import Ledger, progress
from headrace.orchestrator.periodic import log_periodically
from headrace.orchestrator.scheduler import Kind, Scheduler
from headrace.orchestrator.source import TrainSource
from headrace.orchestrator.step_metrics import step_metrics
from headrace.orchestrator.train_sink import ReadyBatch, ScoredGroup, TrainSink
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.types import Group, Rollout
from headrace.rollout.version import Version, may_ship, staleness
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)


class RunFailed(Failure):
    """The run cannot go on. The message names the cause."""


class Settings(msgspec.Struct):
    """The numbers that rule the loop, as plain values."""

    max_steps: int
    batch_size: int | None
    token_batch_size: int | None
    seq_len: int
    group_sizes: dict[str, int]
    max_async_level: int
    max_off_policy_steps: int
    max_empty_batches: int | None
    tasks_per_minute: float | None
    log_loop_interval: float
    keep_rollouts: int


class _Shipped(msgspec.Struct):
    step: int


class _Stop(msgspec.Struct):
    pass


class _Wake(msgspec.Struct):
    """Nothing happened but time: the rate limit allows another task."""


class _Failure(msgspec.Struct):
    error: BaseException


Event = Arrival | ScoredGroup | _Shipped | Version | _Stop | _Wake | _Failure


class Orchestrator:
    """Owns the pipeline of one run."""

    def __init__(
        self,
        settings: Settings,
        run: RunDir,
        source: TrainSource,
        eval_source: EvalSource,
        sink: TrainSink,
        runners: dict[tuple[str, str], EpisodeRunner],
        watcher: WeightWatcher,
        journal: Journal,
        status: Status,
        max_inflight: int,
    ) -> None:
        self.settings = settings
        self.run_dir = run
        self.source = source
        self.eval_source = eval_source
        self.sink = sink
        self.eval_sink = EvalSink()
        self.watcher = watcher
        self.journal = journal
        self.status = status
        self.metrics = MetricsLog(run.metrics, "orchestrator")
        self.scheduler = Scheduler(max_inflight, self._open_group)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.dispatcher = Dispatcher(runners, self.events.put_nowait)
        self.next_step = journal.last_step() + 1
        self.ledger = Ledger(journal.totals())
        self._version = watcher.version
        self._shipping = False
        self._scoring_rollouts = 0
        """Of groups whose credit is being computed, or has been and waits in the queue."""
        self._final_eval_queued = False
        self._failures_in_a_row = 0
        self._empty_batches = 0
        self._tasks_opened = 0
        self._wake_planned = False
        self._next_task_at = 0.0
        self._uncommitted = False
        """A batch's entries have left the ledger and are not in the journal yet."""
        self.ledger.drop_gone(source.gone)
        self._background: set[asyncio.Task[None]] = set()
        # One thread: the journal's connection is used by one caller at a time, in order.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the last step is shipped, its weights are out and every evaluation has closed; or until stopped."""
        self._spawn(self.watcher.run(self.events.put_nowait))
        self._spawn(log_periodically(self.settings.log_loop_interval, self._gauges, self._log_gauges))
        self._queue_due_evals()
        self._show_state()
        try:
            while not self._finished():
                self._dispatch()
                event = await self._next_event()
                if isinstance(event, _Stop):
                    log.info("stopping: %d steps shipped; a resumed run continues from here", self.next_step - 1)
                    break
                self._handle(event)
                self._ship_if_ready()
        finally:
            await self._close()

    def stop(self) -> None:
        self.events.put_nowait(_Stop())

    def _finished(self) -> bool:
        return (
            self.next_step > self.settings.max_steps
            and not self._shipping
            and self._final_eval_queued
            and self.scheduler.open_groups == 0
            and self._scoring_rollouts == 0
        )

    async def _next_event(self) -> Event:
        if not self.events.empty():
            return self.events.get_nowait()
        return await wait_for(self.events.get(), *self._awaited(), self.status)

    def _awaited(self) -> tuple[str, str]:
        """What the loop waits for, and from whom."""
        if self.scheduler.available_permits < self.scheduler.max_inflight:
            return "rollouts", "the inference server"
        if self._wake_planned:
            return "the next task", "the limit tasks_per_minute"
        if self._shipping:
            return f"batch {self.next_step - 1}", "the disk"
        if self._scoring_rollouts:
            return "credit", "the algorithm"
        return f"weights after step {min(self.next_step - 1, self.settings.max_steps)}", "the trainer"

    def _handle(self, event: Event) -> None:
        match event:
            case Arrival():
                self._on_arrival(event)
            case ScoredGroup():
                self._on_scored(event)
            case Version():
                self._on_version(event)
            case _Shipped():
                self._shipping = False
            case _Wake():
                self._wake_planned = False
            case _Failure():
                raise event.error

    # -- what to start --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while (episode := self.scheduler.next_episode(self._wanted())) is not None:
            self.dispatcher.start(episode)

    def _wanted(self) -> int:
        """Open training rollouts that are welcome: enough for every batch that could ship at the current version."""
        last = min(self._version.step + 1 + self.settings.max_async_level, self.settings.max_steps)
        batches = max(0, last - self.next_step + 1)
        if batches == 0 or self._rate_limited():
            return 0
        wanted = batches * self._rollouts_per_batch() - self.sink.ready_rollouts - self._scoring_rollouts
        return max(0, wanted)

    def _rollouts_per_batch(self) -> int:
        if self.settings.batch_size is not None:
            return self.settings.batch_size
        assert self.settings.token_batch_size is not None
        ready, tokens = self.sink.ready_rollouts, self.sink.ready_tokens
        estimate = math.ceil(self.settings.token_batch_size * (ready / tokens if tokens else 1 / self.settings.seq_len))
        return max(estimate, ready + 1) if tokens < self.settings.token_batch_size else estimate

    def _rate_limited(self) -> bool:
        """Whether opening another task now would exceed `tasks_per_minute`; if so, wakes the loop when it may."""
        if self.settings.tasks_per_minute is None:
            return False
        delay = self._next_task_at - time.monotonic()
        if delay <= 0:
            return False
        if not self._wake_planned:
            self._wake_planned = True
            asyncio.get_running_loop().call_later(delay, self.events.put_nowait, _Wake())
        return True

    def _open_group(self) -> Group:
        draw, task = self.source.draw()
        self.ledger.draw(draw)
        self._tasks_opened += 1
        if self.settings.tasks_per_minute is not None:
            self._next_task_at = max(self._next_task_at, time.monotonic()) + 60 / self.settings.tasks_per_minute
        size = self.settings.group_sizes[task.env]
        return Group(f"{draw.id}-{self._tasks_opened}", task, size, self._version.step, draw.id)

    # -- what came back -------------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        episode, rollouts = arrival.episode, arrival.rollouts
        complete = self.scheduler.arrive(episode)
        self.ledger.sampled(rollouts, trained=episode.kind is Kind.TRAIN)
        if episode.kind is Kind.EVAL:
            result = self.eval_sink.add(episode.group, rollouts, complete)
            if result is not None:
                self.metrics.log(result.version, result.metrics)
                score = {name.split("/")[-1]: value for name, value in result.metrics.items() if "@" in name}
                log.info("evaluated %s at version %d: %s", result.env, result.version, _words(score))
            return
        for rollout in rollouts:
            self.sink.add(rollout)
            self._watch_failures(rollout)
        if complete:
            self._score(episode.group)

    def _watch_failures(self, rollout: Rollout) -> None:
        """End a run in which nothing works any more, with the reason; a lone failure costs only itself."""
        if rollout.error is None:
            self._failures_in_a_row = 0
        elif rollout.error.reason not in _OUR_CANCELS:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= max(32, 2 * (self.settings.batch_size or 0)):
                raise RunFailed(
                    f"{self._failures_in_a_row} episodes in a row failed and none succeeded; the last, in environment "
                    f"{rollout.env!r}: {rollout.error.reason}: {rollout.error.detail}"
                )

    def _score(self, group: Group) -> None:
        self._scoring_rollouts += group.size

        async def score() -> None:
            try:
                self.events.put_nowait(await self.sink.process_group(group))
            except Exception as error:
                raise RunFailed(
                    f"the algorithm of environment {group.task.env!r} failed on a group of task {group.task.key}: "
                    f"{type(error).__name__}: {error}"
                ) from error

        self._spawn(score())

    def _on_scored(self, scored: ScoredGroup) -> None:
        self._scoring_rollouts -= scored.group.size
        self.ledger.drop_scored(scored)
        if self.next_step > self.settings.max_steps:  # its credit came too late
            self.ledger.drop_groups(self.sink.drop_ready(lambda group: True), "max_steps")

    def _on_version(self, version: Version) -> None:
        self._version = version
        self._spawn(self._on_disk(self._mark_trained))
        self._give_up_training_work("off_policy", lambda group: self._too_old(group.opened_version))
        self._queue_due_evals()

    def _queue_due_evals(self) -> None:
        version = self._version.step
        self._final_eval_queued = version >= self.settings.max_steps
        source = self.eval_source
        for env in source.overdue_at_end(version) if self._final_eval_queued else source.due(version):
            groups = source.open(env, version)
            self.eval_sink.open(env, version, groups)
            self.scheduler.queue_eval(groups)

    def _too_old(self, version: int) -> bool:
        """Whether a rollout that began at `version` is past use for the batch that is being collected."""
        bound = self.settings.max_off_policy_steps if self.settings.max_async_level else 0
        return staleness(self.next_step, version) > bound

    # -- shipping -------------------------------------------------------------------------------------------------

    def _ship_if_ready(self) -> None:
        step = self.next_step
        if self._shipping or step > self.settings.max_steps:
            return
        if not may_ship(step, self._version.step, self.settings.max_async_level):
            return
        aged = self.sink.drop_ready(lambda group: self._too_old(group.oldest_version))
        self.ledger.drop_groups(aged, "off_policy")
        batch = self.sink.take_batch(self._is_full)
        if batch is None:
            return
        self.ledger.drop_filtered(batch)
        if not batch.kept:
            self._report_empty(batch)
            return
        self._empty_batches = 0
        self.next_step += 1
        self._shipping = True
        self._show_state()
        self._spawn(self._ship(step, batch))
        if step == self.settings.max_steps:
            self._give_up_all_training_work("max_steps")
        elif self.settings.max_async_level == 0:
            self._give_up_all_training_work("on_policy")

    def _is_full(self, rollouts: int, tokens: int) -> bool:
        if self.settings.batch_size is not None:
            return rollouts >= self.settings.batch_size
        return tokens >= (self.settings.token_batch_size or 0)

    async def _ship(self, step: int, batch: ReadyBatch) -> None:
        await self.sink.process_batch(batch.kept)
        entries, hits = self.ledger.take(), self.sink.take_filter_hits()
        values = step_metrics(step, batch) | hits | self.ledger.pace() | progress(entries.totals)
        shipped = [group.group.draw_id for group in batch.kept_groups()]
        record = _record(step, self._version.incarnation, batch.kept, shipped)
        keep_last = self.settings.keep_rollouts
        self._uncommitted = True

        def write() -> None:
            self.run_dir.batches.prepare(record)
            self.journal.ship(step, entries.drawn, shipped, entries.dropped_draws, entries.totals)
            self._uncommitted = False
            self.run_dir.batches.announce(step)
            self.metrics.log(step, values)
            write_rollouts(self.run_dir.rollouts, step, batch.kept, entries.dropped_rollouts, keep_last)

        await self._on_disk(write)
        self.events.put_nowait(_Shipped(step))
        log.info(
            "step %d shipped: reward %.3f, %d of %d rollouts, %.1f s",
            step, values["reward/all/mean"], len(batch.kept), len(batch.rollouts), values["time/step"],
        )  # fmt: skip

    def _report_empty(self, batch: ReadyBatch) -> None:
        counts: dict[str, int] = {}
        for _, reason in batch.dropped:
            counts[reason] = counts.get(reason, 0) + 1
        cause = _cause(max(counts, key=lambda reason: counts[reason]), [rollout.reward for rollout in batch.rollouts])
        self._empty_batches += 1
        message = f"a batch for step {self.next_step} had nothing to train on ({_words(counts)}); {cause}"
        log.warning("%s", message)
        limit = self.settings.max_empty_batches
        if limit is not None and self._empty_batches >= limit:
            raise RunFailed(f"{self._empty_batches} batches in a row without a signal: {message}")

    # -- giving up ------------------------------------------------------------------------------------------------

    def _give_up_all_training_work(self, reason: str) -> None:
        self._give_up_training_work(reason, lambda group: True)
        self.ledger.drop_groups(self.sink.drop_ready(lambda group: True), reason)

    def _give_up_training_work(self, reason: str, unwanted: Callable[[Group], bool]) -> None:
        """Cancel the open groups that match; their episodes arrive as errors with this reason."""
        inflight, finished = self.scheduler.cancel(unwanted)
        for episode in inflight:
            self.dispatcher.cancel(episode, reason)
        for group in finished:
            self._score(group)

    # -- beside the loop ------------------------------------------------------------------------------------------

    def _mark_trained(self) -> None:
        covered = self.run_dir.latest_checkpoint_step()
        if covered:
            self.journal.mark_trained(covered)

    def _gauges(self) -> dict[str, float]:
        mode = 1.0 if self.scheduler.queued_evals else 0.0
        return {
            "dispatcher/inflight_train": self.scheduler.inflight[Kind.TRAIN],
            "dispatcher/inflight_eval": self.scheduler.inflight[Kind.EVAL],
            "dispatcher/sched_mode": mode,
            "dispatcher/available_permits": self.scheduler.available_permits,
            "dispatcher/queued": self.scheduler.queued_evals + self.sink.ready_rollouts,
        }

    def _log_gauges(self, values: dict[str, float]) -> None:
        self.metrics.log(self.next_step - 1, values)
        self.status.set(None, **values)

    def _show_state(self) -> None:
        last = self.next_step > self.settings.max_steps
        self.status.set("every batch is shipped" if last else f"collecting batch {self.next_step}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the loop; a failure comes back as an event and ends the run."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.events.put_nowait(_Failure(error))

    async def _on_disk(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def _close(self) -> None:
        """Cancel what runs, commit what is known, and leave the rest to be drawn again."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.dispatcher.close()
        await self._on_disk(self._commit_at_end)
        self._disk.shutdown()

    def _commit_at_end(self) -> None:
        """What was dropped since the last step, and the totals with it."""
        entries = self.ledger.take()
        if (
            not self._uncommitted
        ):  # else later draws would be recorded without earlier ones; all are drawn again instead
            self.journal.close_session(entries.drawn, entries.dropped_draws, entries.totals)
            self.metrics.log(self.journal.last_step(), progress(entries.totals))
        if self._finished():
            self.journal.drop_open("max_steps")
        self._mark_trained()


_OUR_CANCELS = frozenset({"off_policy", "on_policy", "max_steps", "cancelled"})
"""Reasons of episodes that we ended ourselves: they say nothing about the environment."""


def _cause(reason: str, rewards: list[float]) -> str:
    """What most likely emptied a batch."""
    if reason != "zero_advantage":
        return f"the filter {reason!r} matched them: is the model broken, or the filter too strict?"
    if max(rewards) == min(rewards):
        return f"every reward was {rewards[0]:g}: too hard, too easy, or a reward that does not tell answers apart"
    return "rewards were equal within each group"


def _record(step: int, incarnation: int, rollouts: list[Rollout], draw_ids: list[int]) -> Batch:
    samples = [
        BatchSample(sample, rollout.env, index) for index, rollout in enumerate(rollouts) for sample in rollout.samples
    ]
    return Batch(step, incarnation, samples, draw_ids, {"rollouts": len(rollouts), "samples": len(samples)})


def _words(counts: dict[str, float] | dict[str, int]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(counts.items()))
