"""Every decision of a run, as a state machine: events and the time go in, actions come out.

What to start next, when to evaluate, what to give up, when a group or a batch is complete, what is too old, when to
ship, to commit, to load new weights, and when the run is over. It reads no clock and touches no socket, file or task,
so that a test can run a week of traffic in a second and replay any failure from its seed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from headrace.errors import Failure
from headrace.orchestrator.concurrency import Concurrency
from headrace.orchestrator.demand import Demand
from headrace.orchestrator.drought import Drought
from headrace.orchestrator.evaluation import EvalSink, EvalSource
from headrace.orchestrator.ledger import Ledger
from headrace.orchestrator.scheduler import CompleteGroup, Scheduler
from headrace.orchestrator.settings import Settings
from headrace.orchestrator.signals import (
    Action,
    Arrival,
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
    ScoredGroup,
    Ship,
    Shipped,
    Stop,
    Tick,
    TrainBatch,
)
from headrace.orchestrator.source import TrainSource, lesson_of
from headrace.orchestrator.train_sink import TrainSink
from headrace.rollout.types import Group
from headrace.rollout.version import Version, may_ship, staleness
from headrace.transport.journal import Lesson

log = logging.getLogger(__name__)

COMMIT_INTERVAL = 1.0
"""Seconds after which outcomes that wait for no batch are committed, several at once."""


class RunFailed(Failure):
    """The run cannot go on. The message names the cause."""


class Pipeline:
    """`step` is the batch being collected; `version` is what the engines sample from.

    `start` is a number that no other process of the run has: the draws that it opens again are groups of its own. With
    a `concurrency` the engines' reports move the limit on episodes in flight; without, it stays as it is set. `past` is
    what earlier processes of the run have learned from their draws.
    """

    def __init__(
        self,
        settings: Settings,
        source: TrainSource,
        eval_source: EvalSource,
        ledger: Ledger,
        version: Version,
        step: int,
        now: float,
        start: int = 1,
        concurrency: Concurrency | None = None,
        past: Iterable[Lesson] = (),
    ) -> None:
        self.settings = settings
        self.version = version
        self.step = step
        self.scheduler = Scheduler(settings.max_inflight, self._open_group, whole_groups=settings.max_async_level == 0)
        self.sink = TrainSink(settings.batch_size, settings.token_batch_size, settings.seq_len)
        self.eval_sink = EvalSink()
        self.ledger = ledger
        self.stopped = False
        self.wake_at: float | None = None
        """When a `Tick` is due even if nothing happens."""
        self._concurrency = concurrency
        self._source = source
        self._eval_source = eval_source
        self._now = now
        self._actions: list[Action] = []
        self._in_hand: TrainBatch | None = None
        """The batch for `step`, from the moment it is taken until it ships or proves empty."""
        self._processed = False
        """Whether the batch in hand is."""
        self._shipping = False
        self._groups_in_processing = 0
        self._episodes_in_processing = 0
        """Of training groups, which may fill a batch."""
        self._demand = Demand(in_waves=settings.max_async_level == 0)
        self._published = version
        self._loading = False
        self._final_eval_queued = False
        self._drought = Drought(settings.max_empty_batches, frozenset(settings.group_sizes))
        self._evals_reported = 0
        self._start = start
        self._next_task_at = now
        self._rate_limited = False
        self._commit_at: float | None = None
        self._waits: defaultdict[str, float] = defaultdict(float)
        ledger.drop_gone(source.gone)
        for lesson in past:
            self._note(lesson)
        source.learn()

    # -- in and out -----------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """What to do first."""
        self._now = now
        self._queue_due_evals()
        return self._advance()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what happened; what is to be done about it comes back, in order."""
        self._waits[self._bottleneck()] += now - self._now
        self._now = now
        match event:
            case Arrival():
                self._on_arrival(event)
            case GroupDone():
                self._on_group(event.scored)
            case BatchDone(batch=TrainBatch() as batch):
                self._on_batch(batch)
            case BatchDone(batch=EvalBatch() as batch):
                self.eval_sink.close()
                self._evals_reported += 1
                self._actions.append(ReportEval(batch))
            case Shipped():
                self._shipping = False
            case Published():
                self._published = max(self._published, event.version)
            case Loaded():
                self._on_loaded(event.version)
            case Reported():
                self._on_reports(event)
            case Stop():
                self.stopped = True
            case Failed():
                raise event.error
            case Tick():
                pass
        return self._advance()

    @property
    def finished(self) -> bool:
        """Stopped, or: the last batch is shipped, its weights are loaded, and every evaluation has closed."""
        return self.stopped or (
            self.step > self.settings.max_steps
            and not self._shipping
            and self._final_eval_queued
            and self.scheduler.open_groups == 0
            and self._groups_in_processing == 0
            and self.eval_sink.open_epochs == 0
        )

    @property
    def undelivered(self) -> bool:
        """Whether entries have left the ledger in actions that nobody got, because of an error."""
        return any(isinstance(action, Ship | Commit) for action in self._actions)

    @property
    def progress(self) -> tuple[int, str, int]:
        """Changes when the run gets further."""
        return self.step, str(self.version), self._evals_reported

    @property
    def trains(self) -> bool:
        """Whether there is anything to collect; else versions are evaluated as they are published."""
        return bool(self.settings.group_sizes)

    @property
    def position(self) -> int:
        """Which step the records of this moment belong to."""
        return self.step - 1 if self.trains else self.version.step

    @property
    def doing(self) -> str:
        """In words, for people."""
        if self.step <= self.settings.max_steps:
            return f"collecting batch {self.step}"
        if self.eval_sink.open_epochs:
            return f"evaluating version {self.version.step}"
        return "every batch is shipped" if self.trains else "between evaluations"

    @property
    def collected(self) -> tuple[str, int, int] | None:
        """How far `doing` has come: the unit, how many there are, how many it takes; None where nothing is counted."""
        if self.step <= self.settings.max_steps:
            return self.sink.filling
        return ("tasks", *self.eval_sink.tasks) if self.eval_sink.open_epochs else None

    @property
    def problem(self) -> str:
        """Why no batch ships although rollouts arrive; empty as long as one does."""
        return (self._drought.story or "") if self.step <= self.settings.max_steps else ""

    def awaited(self) -> tuple[str, str]:
        """What everything waits for, and from whom."""
        if self._loading:
            return f"acknowledgement of weights {self._published}", "the inference server"
        if self._shipping:
            return f"batch {self.step - 1}", "the disk"
        if self._in_hand is not None and not self._processed:
            return f"scores of batch {self.step}", "the algorithms"
        if self.step <= self.settings.max_steps and not self._may_ship():
            return f"weights after step {self.step - 1 - self.settings.max_async_level}", "the trainer"
        if self._rate_limited:
            return "the next task", "the limit tasks_per_minute"
        if self.scheduler.available_permits < self.scheduler.max_inflight:
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
            "dispatcher/available_permits": scheduler.available_permits,
            "dispatcher/queued": scheduler.queued_evals + self.sink.rollouts,
        }

    def _advance(self) -> list[Action]:
        """After every event: whatever has become possible."""
        if not self.stopped:
            self._load_if_allowed()
            self._ship_if_allowed()
            self._take_batch_if_ready()
            self._dispatch()
            self._commit_if_due()
            self._plan_wake()
        actions, self._actions = self._actions, []
        return actions

    # -- what to start --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while (episode := self.scheduler.next_episode(self._wanted(), may_begin=self._may_begin())) is not None:
            self._actions.append(RunEpisode(episode))
            if episode.index == 0 and self.settings.tasks_per_minute is not None:
                self._next_task_at = max(self._next_task_at, self._now) + 60 / self.settings.tasks_per_minute

    def _wanted(self) -> int:
        """Open training episodes that are welcome: enough for every batch that could ship at the current version.

        Above level 0 those that have arrived in groups that are not complete are left out of the count: permits would
        idle until the last straggler of each group is in, and what is sampled meanwhile is for the next batch.
        """
        if not self._demand.in_waves:
            return self._demand.episodes(self._lacking(), self._episodes_in_processing)
        if self._is_settled:
            self._source.learn()  # not before: a wave's draws know all that came before it, and nothing of each other
            self._demand.begin_wave(self._lacking())
        return self.scheduler.open_episodes + self._demand.rest_of_wave

    @property
    def _is_settled(self) -> bool:
        """Whether everything that was or is still to be started of a wave is in and credited."""
        return not (self.scheduler.open_episodes or self._episodes_in_processing or self._demand.rest_of_wave)

    def _lacking(self) -> int:
        """Rollouts that are missing for every batch that could ship at the current version."""
        last = min(self.version.step + 1 + self.settings.max_async_level, self.settings.max_steps)
        batches = last - self.step + 1 - (self._in_hand is not None)
        return self.sink.missing(batches) if batches > 0 else 0

    def _may_begin(self) -> bool:
        """Whether the rate allows another task to begin, be it of training or of evaluation."""
        self._rate_limited = self._next_task_at > self._now
        return not self._rate_limited

    def _open_group(self) -> Group:
        draw, task = self._source.draw()
        self.ledger.draw(draw)
        size = self.settings.group_sizes[task.env]
        self._demand.opened(size)
        return Group(
            f"{draw.id}-{self._start}",
            task,
            size,
            self.version.step,
            draw.id,
            together=task.env in self.settings.scored_together,
        )

    # -- what came back -------------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        episode = arrival.episode
        complete = self.scheduler.arrive(episode, arrival.rollouts)
        self.ledger.arrived(arrival.rollouts, training=episode.kind is Kind.TRAIN)
        for group in complete:
            self._on_complete(group)

    def _on_complete(self, complete: CompleteGroup) -> None:
        if complete.cancelled:
            scored = complete.given_up()
            self.ledger.enter(scored)
            self._hear(scored)
            return
        self._groups_in_processing += 1
        if complete.kind is Kind.TRAIN:
            self._episodes_in_processing += complete.group.size
        self._actions.append(ProcessGroup(complete.kind, complete.group, complete.rollouts))

    def _on_group(self, scored: ScoredGroup) -> None:
        self._groups_in_processing -= 1
        if scored.kind is Kind.EVAL:
            batch = self.eval_sink.add(scored)
            if batch is not None:
                self._actions.append(ProcessBatch(batch))
            return
        self._episodes_in_processing -= scored.group.size
        self.ledger.enter(scored)
        self._hear(scored)
        _fail_if(self._drought.on_group(scored, self.step, self.sink.rollouts_per_batch))
        if not scored.rollouts:
            return
        if self.step > self.settings.max_steps:  # its credit came too late
            self.ledger.drop_groups([scored], "max_steps")
        elif self._is_too_old(scored.group, scored.oldest_version):
            self.ledger.drop_groups([scored], self._reason_for_age())
        else:
            self.sink.add(scored)

    def _hear(self, scored: ScoredGroup) -> None:
        """What became of a training group, for the draws to come."""
        self._note(lesson_of(scored, self.step))
        if not self._demand.in_waves:
            self._source.learn()

    def _note(self, lesson: Lesson) -> None:
        self._source.hear(lesson)
        if lesson.rewards and lesson.env in self.settings.group_sizes:
            self._demand.credited(len(lesson.rewards), self.settings.group_sizes[lesson.env])
            if lesson.tokens:
                self.sink.credited(lesson.step, len(lesson.rewards), lesson.tokens)

    def _on_loaded(self, version: Version) -> None:
        self.version = version
        self._loading = False
        self._queue_due_evals()

    def _on_reports(self, reported: Reported) -> None:
        if self._concurrency is not None:
            in_flight = sum(self.scheduler.inflight.values())
            self.scheduler.max_inflight = self._concurrency.follow(reported.engines, in_flight)

    def _load_if_allowed(self) -> None:
        """One update at a time, and none while an evaluation is pinned to the current version."""
        if self._published > self.version and not self._loading and not self.eval_sink.pins_version:
            self._loading = True
            self._actions.append(Load(self._published))

    def _queue_due_evals(self) -> None:
        version, source = self.version, self._eval_source
        self._final_eval_queued = version.step >= self.settings.max_steps
        source.follow(version)
        for env in source.overdue_at_end(version) if self._final_eval_queued else source.due(version):
            groups = source.open(env, version)
            self.eval_sink.open(env, version, groups, self._now)
            log.info(
                "evaluating %s at version %d: %d tasks, %d episodes each",
                env.name, version.step, len(env.tasks), env.group_size,
            )  # fmt: skip
            self.scheduler.queue_eval(groups)

    # -- batches --------------------------------------------------------------------------------------------------

    def _take_batch_if_ready(self) -> None:
        if self._shipping or self._in_hand is not None or self.step > self.settings.max_steps:
            return
        if not self._may_ship() or (self._demand.in_waves and not self._is_settled):
            return
        # What is credited first is committed first, so it ships first; at level 0 the rest is dropped right after.
        self._in_hand = self.sink.take_batch(drawn_first=self._demand.in_waves)
        if self._in_hand is not None:
            self._actions.append(ProcessBatch(self._in_hand))

    def _on_batch(self, batch: TrainBatch) -> None:
        if batch.kept:
            self._processed = True
        else:
            self._in_hand = None
            self.ledger.settle(batch)
        _fail_if(self._drought.on_batch(batch, self.step))

    def _ship_if_allowed(self) -> None:
        """Usually at once; a trainer that went back to an older checkpoint meanwhile has to catch up first."""
        batch = self._in_hand
        if batch is None or not self._processed or self._shipping or not self._may_ship():
            return
        self._in_hand, self._processed = None, False
        self.ledger.settle(batch)  # not before: what is settled as shipped may be committed any moment
        step, self.step = self.step, self.step + 1
        self._shipping = True
        if step == self.settings.max_steps:
            self._give_up_everything("max_steps")
        elif self.settings.max_async_level == 0:
            self._give_up_everything("on_policy")
        else:
            self._give_up_the_aged()
        self._actions.append(self._ship(step, batch))

    def _ship(self, step: int, batch: TrainBatch) -> Ship:
        waits = {f"time/{name}": self._waits[name] for name in ("wait_for_rollouts", "wait_for_weights")}
        self._waits.clear()
        self._commit_at = None
        entries = self.ledger.take(self._now)
        metrics = self.ledger.take_step_metrics(self._now) | waits | self.ledger.progress(self._now)
        metrics |= self._source.metrics()
        dropped = self.ledger.take_dropped()
        return Ship(step, self.version.incarnation, batch, entries, dropped, metrics)

    def _may_ship(self) -> bool:
        return may_ship(self.step, self.version.step, self.settings.max_async_level)

    def _is_too_old(self, group: Group, version: int) -> bool:
        """Whether a rollout of the group that began at `version` is past use for the batch that is being collected."""
        ages = group.task.env not in self.settings.frozen
        return ages and staleness(self.step, version) > self.settings.oldest_allowed

    def _reason_for_age(self) -> str:
        return "off_policy" if self.settings.max_async_level else "on_policy"

    # -- giving up ------------------------------------------------------------------------------------------------

    def _give_up_the_aged(self) -> None:
        """Age is counted from the batch being collected: each step makes everything open one older."""
        reason = self._reason_for_age()
        self._give_up(reason, lambda group: self._is_too_old(group, group.opened_version))
        aged = self.sink.drop(lambda scored: self._is_too_old(scored.group, scored.oldest_version))
        self.ledger.drop_groups(aged, reason)

    def _give_up_everything(self, reason: str) -> None:
        self._give_up(reason, lambda group: True)
        self.ledger.drop_groups(self.sink.drop(lambda group: True), reason)

    def _give_up(self, reason: str, unwanted: Callable[[Group], bool]) -> None:
        """Cancel the open training groups that match; their episodes arrive as errors with this reason."""
        inflight, finished = self.scheduler.cancel(unwanted, reason)
        self._actions += [CancelEpisode(episode, reason) for episode in inflight]
        for complete in finished:
            self._on_complete(complete)

    # -- time -----------------------------------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        """Outcomes that wait for no batch are committed a little later, several at once."""
        if not self.ledger.has_outcomes:
            self._commit_at = None
        elif self._commit_at is None:
            self._commit_at = self._now + COMMIT_INTERVAL
        elif self._now >= self._commit_at:
            self._commit_at = None
            self._actions.append(Commit(self.ledger.take(self._now)))

    def _plan_wake(self) -> None:
        times = [self._commit_at, self._next_task_at if self._next_task_at > self._now else None]
        self.wake_at = min((time for time in times if time is not None), default=None)

    def _bottleneck(self) -> str:
        """What keeps the next step from shipping right now, as a metric's name; none at the end."""
        if self.step > self.settings.max_steps or self._shipping:
            return ""
        if not self._may_ship():
            return "wait_for_weights"
        if self._in_hand is not None:
            return ""  # its processing is timed by itself
        return "wait_for_rollouts"


def _fail_if(cause: str | None) -> None:
    if cause is not None:
        raise RunFailed(cause)
