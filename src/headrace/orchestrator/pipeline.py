"""Every decision of a run as a state machine: events and the time go in, actions come out.

Decides what to start next, when to evaluate, what to cancel, when a group or a batch is complete, what is too old, when
to ship, to commit, to load new weights, and when the run is over. It reads no clock and uses no socket, file or task,
so a test can run a week of traffic in a second and replay any failure from its seed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from headrace.orchestrator import signals
from headrace.orchestrator.concurrency import Concurrency, Occupancy
from headrace.orchestrator.empty_batches import EmptyBatches
from headrace.orchestrator.evaluation import EvalSource, EvalTracker
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.scheduler import CompleteGroup, EpisodeScheduler
from headrace.orchestrator.signals import EvalBatch, Kind, ScoredGroup, TrainBatch
from headrace.orchestrator.source import TrainSource, result_of
from headrace.orchestrator.train_buffer import EpisodeCapacity, TrainBuffer
from headrace.rollout.types import Group
from headrace.rollout.version import Version, may_ship, staleness
from headrace.transport.journal_entries import ON_POLICY, DrawResult

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0
"""Delay after which outcomes that belong to no batch are committed together."""


class PipelineSettings(msgspec.Struct):
    """Settings of a run about steps, batches, ages and concurrency."""

    max_steps: int
    batch_size: int | None
    token_batch_size: int | None
    seq_len: int
    group_sizes: dict[str, int]
    max_inflight: int
    engine_slots: int | None = None
    """Requests that the engines run at once; None if their use by episodes is not measured."""
    max_async_level: int = 1
    max_off_policy_steps: int = 8
    max_empty_batches: int | None = None
    tasks_per_minute: float | None = None
    scored_together: frozenset[str] = frozenset()
    """Environments that score groups: the episodes of a group start together."""
    frozen: frozenset[str] = frozenset()
    """Environments whose episodes are sampled from a frozen model: their rollouts never age."""


class Pipeline:
    """The state machine. `step` is the batch being collected; `version` is what the engines sample from.

    `epoch` is the number of this process in the run, so reopened draws get new group ids. With a `concurrency` the
    limit on episodes in flight follows the engines' reports. `past` are the results of earlier processes of the run.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        source: TrainSource,
        eval_source: EvalSource,
        buffer: JournalBuffer,
        version: Version,
        step: int,
        now: float,
        epoch: int = 1,
        concurrency: Concurrency | None = None,
        past: Iterable[DrawResult] = (),
    ) -> None:
        self.settings, self.version, self.step, self.buffer = settings, version, step, buffer
        in_waves = settings.max_async_level == 0
        self.scheduler = EpisodeScheduler(settings.max_inflight, self._open_group, whole_groups=in_waves)
        self.train_buffer = TrainBuffer(settings.batch_size, settings.token_batch_size, settings.seq_len)
        self.evals = EvalTracker()
        self.stopped = False
        self.wake_at: float | None = None
        """When a `Tick` is due if nothing else happens."""
        self._concurrency, self._source, self._eval_source = concurrency, source, eval_source
        self._epoch, self._now, self._next_task_at = epoch, now, now
        self._actions: list[signals.Action] = []
        self._current: TrainBatch | None = None
        """The batch for `step`, from the time it is taken until it ships or turns out to be empty."""
        self._processed = False
        """Whether the current batch is processed."""
        self._shipping = False
        self._groups_in_processing = 0
        self._episodes_in_processing = 0
        """Episodes of those groups that are for training."""
        largest = max(settings.group_sizes.values(), default=1)
        self._capacity = EpisodeCapacity(in_waves=in_waves, batch_size=settings.batch_size, group_size=largest)
        self._published = version
        self._loading = False
        self._final_eval_queued = False
        self._empty_batches = EmptyBatches(settings.max_empty_batches, frozenset(settings.group_sizes))
        self._evals_reported = 0
        self._rate_limited = False
        self._commit_at: float | None = None
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._occupancy = Occupancy(settings.engine_slots) if settings.engine_slots else None
        buffer.drop_missing(source.missing)
        last_step = []
        for result in past:
            self._add_result(result)
            if result.step == step - 1:
                last_step.append(result)
        self._capacity.begin_step(
            surplus=[result.draw for result in last_step if result.surplus],
            credited={result.draw: len(result.rewards) for result in last_step},
        )
        source.learn()

    # -- events in, actions out -----------------------------------------------------------------------------------

    def start(self, now: float) -> list[signals.Action]:
        """Return the first actions."""
        self._now = now
        self._queue_due_evals()
        return self._advance()

    def handle(self, event: signals.Event, now: float) -> list[signals.Action]:
        """Process an event; return the actions to perform, in order."""
        bottleneck, in_flight = self._bottleneck(), sum(self.scheduler.inflight.values())
        self._waits[bottleneck] += now - self._now
        if self._occupancy is not None:
            self._occupancy.advance(now - self._now, in_flight, awaits_rollouts=bottleneck == "wait_for_rollouts")
        self._now = now
        match event:
            case signals.Arrival(episode=episode, rollouts=rollouts):
                complete = self.scheduler.arrive(episode, rollouts)
                self.buffer.count_rollouts(rollouts, training=episode.kind is Kind.TRAIN)
                for group in complete:
                    self._on_complete(group)
            case signals.GroupDone():
                self._on_group(event.scored)
            case signals.BatchDone(batch=TrainBatch() as batch):
                self._on_batch(batch)
            case signals.BatchDone(batch=EvalBatch() as batch):
                self.evals.record_reported()
                self._evals_reported += 1
                self._actions.append(signals.ReportEval(batch))
            case signals.Shipped():
                self._shipping = False
            case signals.Published():
                self._published = max(self._published, event.version)
            case signals.Loaded():
                self.version = event.version
                self._loading = False
                self._queue_due_evals()
            case signals.Reported():
                if self._occupancy is not None and event.engines:
                    self._occupancy.slots = sum(health.capacity for health in event.engines.values())
                if self._concurrency is not None:
                    self.scheduler.max_inflight = self._concurrency.update(event.engines, in_flight)
            case signals.Stop():
                self.stopped = True
            case signals.Failed():
                raise event.error
            case signals.Tick():
                pass
        return self._advance()

    @property
    def finished(self) -> bool:
        """Return whether the run was stopped, or its last batch shipped, weights loaded and evaluations reported."""
        return self.stopped or (
            self.step > self.settings.max_steps
            and not self._shipping
            and self._final_eval_queued
            and not self.scheduler.groups
            and self._groups_in_processing == 0
            and self.evals.open_evals == 0
        )

    @property
    def has_lost_entries(self) -> bool:
        """Return whether an error kept journal entries that were taken from the buffer from being returned."""
        return any(isinstance(action, signals.Ship | signals.Commit) for action in self._actions)

    @property
    def progress(self) -> tuple[int, str, int]:
        """Return a value that changes when the run advances."""
        return self.step, str(self.version), self._evals_reported

    @property
    def trains(self) -> bool:
        """Return whether the run trains; otherwise it only evaluates published versions."""
        return bool(self.settings.group_sizes)

    @property
    def position(self) -> int:
        """Return the step that metrics recorded now belong to."""
        return self.step - 1 if self.trains else self.version.step

    @property
    def activity(self) -> str:
        """Return what the orchestrator is doing, for the status file."""
        if self.step <= self.settings.max_steps:
            return f"collecting batch {self.step}"
        if self.evals.open_evals:
            return f"evaluating version {self.version.step}"
        return "every batch is shipped" if self.trains else "between evaluations"

    @property
    def collected(self) -> tuple[str, int, int] | None:
        """Return the progress of `activity` as unit, count and total; None where nothing is counted."""
        if self.step <= self.settings.max_steps:
            return self.train_buffer.progress
        return ("tasks", *self.evals.tasks) if self.evals.open_evals else None

    @property
    def problem(self) -> str:
        """Return why no batch ships although rollouts arrive; empty if batches ship."""
        return self._empty_batches.problem if self.step <= self.settings.max_steps else ""

    def awaited(self) -> tuple[str, str]:
        """Return what the run waits for, and from which component."""
        if self._loading:
            return f"acknowledgement of weights {self._published}", "the inference server"
        if self._shipping:
            return f"batch {self.step - 1}", "the disk"
        if self._current is not None and not self._processed:
            return f"scores of batch {self.step}", "the algorithms"
        if self.step <= self.settings.max_steps and not self._may_ship():
            return f"weights after step {self.step - 1 - self.settings.max_async_level}", "the trainer"
        if self._rate_limited:
            return "the next task", "the limit tasks_per_minute"
        if self.scheduler.free_slots < self.scheduler.max_inflight:
            return "rollouts", "the environments and the inference server"
        if self._groups_in_processing:
            return "scores of groups", "the environments and the algorithms"
        return f"weights after step {self.settings.max_steps}" if self.trains else "the next version", "the trainer"

    def gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        return {
            "dispatcher/inflight_train": scheduler.inflight[Kind.TRAIN],
            "dispatcher/inflight_eval": scheduler.inflight[Kind.EVAL],
            "dispatcher/sched_mode": 1.0 if scheduler.queued_evals else 0.0,
            "dispatcher/max_inflight": scheduler.max_inflight,
            "dispatcher/available_permits": scheduler.free_slots,
            "dispatcher/queued": scheduler.queued_evals + self.train_buffer.rollouts,
        }

    def _advance(self) -> list[signals.Action]:
        """Do everything that an event has made possible, and return the collected actions."""
        if not self.stopped:
            # One update at a time, and none while an evaluation is pinned to the current version.
            if self._published > self.version and not self._loading and not self.evals.pinned_evals:
                self._loading = True
                self._actions.append(signals.Load(self._published))
            self._ship_if_allowed()
            self._take_batch_if_ready()
            self._start_episodes()
            self._commit_if_due()
            times = [self._commit_at, self._next_task_at if self._next_task_at > self._now else None]
            self.wake_at = min((time for time in times if time is not None), default=None)
        actions, self._actions = self._actions, []
        return actions

    # -- starting episodes ----------------------------------------------------------------------------------------

    def _start_episodes(self) -> None:
        while True:
            wanted = self._wanted_episodes()
            self._rate_limited = self._next_task_at > self._now
            episode = self.scheduler.next_episode(wanted, may_begin=not self._rate_limited)
            if episode is None:
                return
            self._actions.append(signals.RunEpisode(episode))
            if episode.index == 0 and self.settings.tasks_per_minute is not None:
                self._next_task_at = max(self._next_task_at, self._now) + 60 / self.settings.tasks_per_minute

    def _wanted_episodes(self) -> int:
        """Return how many training episodes should be open: enough for every batch that can ship at this version.

        Above level 0, arrived episodes of incomplete groups do not count: slots would idle until the last straggler
        of each group has arrived, and what is sampled meanwhile is used in the next batch.
        """
        if not self._capacity.in_waves:
            return self._capacity.episodes_for(self._missing_rollouts(), self._episodes_in_processing)
        if self._wave_is_done:
            self._source.learn()  # not before: the draws of a wave depend on earlier waves, not on each other
            self._capacity.begin_wave(self._missing_rollouts())
        return self.scheduler.open_episodes + self._capacity.rest_of_wave

    @property
    def _wave_is_done(self) -> bool:
        """Return whether every episode of the current wave is started and credited."""
        return not (self.scheduler.open_episodes or self._episodes_in_processing or self._capacity.rest_of_wave)

    def _missing_rollouts(self) -> int:
        """Return the rollouts that are missing for every batch that can ship at the current version."""
        last = min(self.version.step + 1 + self.settings.max_async_level, self.settings.max_steps)
        batches = last - self.step + 1 - (self._current is not None)
        return self.train_buffer.missing(batches) if batches > 0 else 0

    def _open_group(self) -> Group:
        draw, task = self._source.draw()
        self.buffer.drawn.append(draw)
        size = self.settings.group_sizes[task.env]
        self._capacity.wave -= size
        together = task.env in self.settings.scored_together
        return Group(f"{draw.id}-{self._epoch}", task, size, self.version.step, draw.id, together=together)

    # -- results --------------------------------------------------------------------------------------------------

    def _on_complete(self, complete: CompleteGroup) -> None:
        """Start the processing of a complete group; only record one that was cancelled."""
        if complete.cancelled:
            self._record_group(ScoredGroup.of(complete.kind, complete.group, complete.rollouts, complete.cancelled))
            return
        self._groups_in_processing += 1
        if complete.kind is Kind.TRAIN:
            self._episodes_in_processing += complete.group.size
        self._actions.append(signals.ProcessGroup(complete.kind, complete.group, complete.rollouts))

    def _on_group(self, scored: ScoredGroup) -> None:
        """Add a processed group to its evaluation, or to the training buffer unless it is too old or too late."""
        self._groups_in_processing -= 1
        if scored.kind is Kind.EVAL:
            batch = self.evals.add(scored)
            if batch is not None:
                self._actions.append(signals.ProcessBatch(batch))
            return
        self._episodes_in_processing -= scored.group.size
        self._record_group(scored)
        self._capacity.record_kept(scored.group.draw_id, len(scored.credited), len(scored.rollouts))
        self._empty_batches.record_group(scored, self.step, self.train_buffer.rollouts_per_batch)
        if not scored.rollouts:
            return
        if self.step > self.settings.max_steps:  # credited after the last batch was taken
            self.buffer.drop_groups([scored], "max_steps")
        elif self._is_too_old(scored.group, scored.oldest_version):
            self.buffer.drop_groups([scored], self._age_reason)
        else:
            self.train_buffer.add(scored)

    def _record_group(self, scored: ScoredGroup) -> None:
        """Record the outcome of a training group in the journal buffer and for later draws."""
        self.buffer.add_group(scored)
        self._add_result(result_of(scored, self.step))
        if not self._capacity.in_waves:
            self._source.learn()

    def _add_result(self, result: DrawResult) -> None:
        """Pass the result of a draw to the source, and to the estimates of episodes and lengths per rollout."""
        self._source.add_result(result)
        if result.rewards and result.env in self.settings.group_sizes:
            self._capacity.record_credit(len(result.rewards), self.settings.group_sizes[result.env])
            if result.tokens:
                self.train_buffer.record_lengths(result.step, len(result.rewards), result.tokens)

    def _queue_due_evals(self) -> None:
        version, source = self.version, self._eval_source
        self._final_eval_queued = version.step >= self.settings.max_steps
        source.discard_newer(version)
        for env in source.due(version, final=self._final_eval_queued):
            groups = source.open(env, version)
            self.evals.open(env, version, groups, self._now)
            log.info(
                "evaluating %s at version %d: %d tasks, %d episodes each",
                env.name, version.step, len(env.tasks), env.group_size,
            )  # fmt: skip
            self.scheduler.queue_eval(groups)

    # -- batches --------------------------------------------------------------------------------------------------

    def _take_batch_if_ready(self) -> None:
        if self._shipping or self._current is not None or self.step > self.settings.max_steps or not self._may_ship():
            return
        if self._capacity.in_waves and not self._wave_is_done:
            return
        # Groups ship in the order of their credit, like commits; at level 0 the rest is dropped right after.
        self._current = self.train_buffer.take_batch(drawn_first=self._capacity.in_waves)
        if self._current is not None:
            self._current.step = self.step
            self._actions.append(signals.ProcessBatch(self._current))

    def _on_batch(self, batch: TrainBatch) -> None:
        """Mark the current batch as processed, or discard it if no rollout was kept."""
        if batch.kept:
            self._processed = True
        else:
            self._current = None
            self.buffer.finalize_batch(batch)
        self._empty_batches.record_batch(batch, self.step)

    def _ship_if_allowed(self) -> None:
        """Ship the processed batch; after a rewind of the trainer, only once the trainer has caught up."""
        batch = self._current
        if batch is None or not self._processed or self._shipping or not self._may_ship():
            return
        self._current, self._processed = None, False
        self.buffer.finalize_batch(batch)  # not before: final outcomes may be committed at any time
        step, self.step = self.step, self.step + 1
        self._shipping = True
        if step == self.settings.max_steps or self.settings.max_async_level == 0:
            reason = "max_steps" if step == self.settings.max_steps else ON_POLICY
            surplus = self._drop_training(reason, lambda group: True, lambda scored: True)
            self._capacity.begin_step([scored.group.draw_id for scored in surplus])
        else:  # ages are counted from the batch being collected: each step makes every open group one step older
            self._drop_training(
                self._age_reason,
                lambda group: self._is_too_old(group, group.opened_version),
                lambda scored: self._is_too_old(scored.group, scored.oldest_version),
            )
        self._actions.append(self._make_ship(step, batch))

    def _make_ship(self, step: int, batch: TrainBatch) -> signals.Ship:
        """Return the action that ships a batch, with the journal entries and metrics since the last one."""
        waits = {f"time/{name}": self._waits[name] for name in ("wait_for_rollouts", "wait_for_weights")}
        self._waits.clear()
        self._commit_at = None
        entries = self.buffer.take_entries(self._now)
        metrics = self.buffer.take_step_metrics(self._now) | waits | self.buffer.progress(self._now)
        if self._occupancy is not None:
            metrics |= self._occupancy.take_metrics()
        if self._concurrency is not None:
            outdated, in_flight = int(metrics.get("dropped/off_policy", 0)), sum(self.scheduler.inflight.values())
            self.scheduler.max_inflight = self._concurrency.record_batch(len(batch.rollouts), outdated, in_flight)
        metrics |= self._source.metrics()
        return signals.Ship(step, self.version.incarnation, batch, entries, metrics)

    def _may_ship(self) -> bool:
        return may_ship(self.step, self.version.step, self.settings.max_async_level)

    def _is_too_old(self, group: Group, version: int) -> bool:
        """Return whether a rollout of the group with tokens of `version` is too old for the current batch."""
        max_staleness = self.settings.max_off_policy_steps if self.settings.max_async_level else 0
        return group.task.env not in self.settings.frozen and staleness(self.step, version) > max_staleness

    @property
    def _age_reason(self) -> str:
        return "off_policy" if self.settings.max_async_level else ON_POLICY

    def _drop_training(
        self, reason: str, drop_open: Callable[[Group], bool], drop_scored: Callable[[ScoredGroup], bool]
    ) -> list[ScoredGroup]:
        """Cancel the open groups that match; drop the buffered groups that match, and return these."""
        inflight, finished = self.scheduler.cancel(drop_open, reason)
        self._actions += [signals.CancelEpisode(episode, reason) for episode in inflight]
        for complete in finished:
            self._on_complete(complete)
        dropped = self.train_buffer.drop(drop_scored)
        self.buffer.drop_groups(dropped, reason)
        return dropped

    # -- time -----------------------------------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        """Commit outcomes that belong to no batch, after a delay so that several are committed together."""
        if not self.buffer.has_outcomes:
            self._commit_at = None
        elif self._commit_at is None:
            self._commit_at = self._now + COMMIT_INTERVAL_S
        elif self._now >= self._commit_at:
            self._commit_at = None
            self._actions.append(signals.Commit(self.buffer.take_entries(self._now)))

    def _bottleneck(self) -> str:
        """Return the metric that counts the current wait: `wait_for_rollouts`, `wait_for_weights` or none ("")."""
        if self.step > self.settings.max_steps or self._shipping:
            return ""
        if not self._may_ship():
            return "wait_for_weights"
        if self._current is not None:
            return ""  # its processing has its own metric
        return "wait_for_rollouts"
