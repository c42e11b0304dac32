"""How full the engine is around a batch, and how old its rollouts get: the real pipeline in simulated time.

    python benchmarks/orchestrator/tail.py [--traffic gsm8k reasoning] [--level 0 1 2] [--limit auto 256 384 512]

Everything but the pipeline is simulated. The engine runs up to `capacity` requests; a step takes `a + b * running` and
samples one token for each (figures of a 0.5B model on an H200). Completion lengths are real ones. Trainer and engine
share one GPU: in turns (`alternate`), or both at half the speed (`overlap`). One row for each setting:

    step s    between two batches
    tail s    of it, a batch waited for rollouts with fewer episodes in flight than half of the slots (`time/tail`)
    full      requests that ran, as a share of the slots, while the engine could run
    queue     requests that waited, as a share of the slots
    stale     age of the oldest token of a trained rollout in optimizer steps: mean, 95th percentile, maximum
    wasted    share of the sampled tokens that were cancelled or dropped, also at the end of the run
    length    mean length of what was trained, relative to what the policy samples: below 1, long rollouts were lost
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.inference.schema import Health
from headrace.orchestrator import signals
from headrace.orchestrator.concurrency import Concurrency
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.signals import Episode, EvalBatch, Kind, ScoredGroup, TrainBatch
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Rollout, RolloutError, Task, Turn
from headrace.rollout.version import Version, staleness
from headrace.transport.journal_entries import Clock, Totals

LENGTHS = Path(__file__).parents[1] / "data/traffic_lengths.json"
GROUP_SIZE = 8
REQUEST_S = 0.005
"""From the decision to start an episode to its request in the engine's queue, and the same on the way back."""
CREDIT_S = 0.005
BATCH_S = 0.05
"""Processing of a batch, writing it, and reading it in the trainer."""
LOAD_S = 0.05
"""From published weights to their acknowledgement by the engine."""
REPORT_INTERVAL_S = 2.0


class Workload(NamedTuple):
    """Times of an engine step and of a training step."""

    lengths: str
    step_s: float
    step_s_per_request: float
    train_s: float


WORKLOADS = {
    "gsm8k": Workload("gsm8k", 2.2e-3, 3.5e-6, 0.35),
    "reasoning": Workload("reasoning", 2.2e-3, 12e-6, 2.8),  # longer contexts: more of the KV cache is read
}


class Case(NamedTuple):
    """One row of the table."""

    traffic: str
    sharing: str = "alternate"
    level: int = 1
    limit: int | None = None
    """Episodes in flight; None: automatic."""
    capacity: int = 256
    batch_size: int = 256
    keep: float = 1.0
    """Share of the groups that a gate keeps."""
    eval_tasks: int = 0
    """Tasks that are evaluated every ten steps."""
    steps: int = 60


class Clockwork:
    """Simulated time and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), what))

    @property
    def next_at(self) -> float:
        return self._due[0][0]

    def pop(self) -> Callable[[], None]:
        self.now, _, what = heapq.heappop(self._due)
        return what


class Request(NamedTuple):
    """A request in the engine. Ordered by the engine step in which it ends."""

    ends_at: int
    episode: int
    length: int
    version: int
    """Version that samples its first token."""


class EngineModel:
    """Runs requests first come, first served. Time passes in whole steps, whose time depends on how many run."""

    def __init__(self, clock: Clockwork, case: Case, finish: Callable[[Request], None]) -> None:
        self._clock, self._case, self._finish = clock, case, finish
        self._workload = WORKLOADS[case.traffic]
        self.version = 0
        self.running: list[Request] = []
        self.waiting: deque[tuple[int, int]] = deque()
        """Episode and length."""
        self.slowdown = 1.0
        self.is_paused = False
        self._steps = 0.0
        self._updated_at = 0.0
        self._epoch = 0
        """Changes with every change of what runs; a scheduled completion of an older one is void."""
        self.seconds = self.slot_seconds = self.queue_seconds = 0.0

    def submit(self, episode: int, length: int) -> None:
        self._advance()
        self.waiting.append((episode, length))
        self._schedule()

    def cancel(self, episode: int) -> int:
        """Remove a request; return how many tokens it has sampled."""
        self._advance()
        running = [request for request in self.running if request.episode == episode]
        self.running = [request for request in self.running if request.episode != episode]
        heapq.heapify(self.running)
        self.waiting = deque(entry for entry in self.waiting if entry[0] != episode)
        self._schedule()
        return sum(max(0, request.length - int(request.ends_at - self._steps)) for request in running)

    def set_paused(self, paused: bool) -> None:
        self._advance()
        self.is_paused = paused
        self._schedule()

    def set_slowdown(self, factor: float) -> None:
        self._advance()
        self.slowdown = factor
        self._schedule()

    def _advance(self) -> None:
        """Account for the time since the last change."""
        seconds, self._updated_at = self._clock.now - self._updated_at, self._clock.now
        if self.is_paused:
            return
        running = len(self.running)
        self.seconds += seconds
        self.slot_seconds += seconds * running / self._case.capacity
        self.queue_seconds += seconds * len(self.waiting) / self._case.capacity
        if running:
            self._steps += seconds / self._step_s

    @property
    def _step_s(self) -> float:
        return self.slowdown * (self._workload.step_s + self._workload.step_s_per_request * len(self.running))

    def _schedule(self) -> None:
        """Fill free slots, and schedule the next completion."""
        while self.waiting and len(self.running) < self._case.capacity:
            episode, length = self.waiting.popleft()
            heapq.heappush(self.running, Request(round(self._steps) + length, episode, length, self.version))
        self._epoch += 1
        if self.running and not self.is_paused:
            steps = max(0.0, self.running[0].ends_at - self._steps)
            epoch = self._epoch
            self._clock.after(steps * self._step_s, lambda: self._complete(epoch))

    def _complete(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        self._steps = max(self._steps, float(self.running[0].ends_at))
        while self.running and self.running[0].ends_at <= self._steps:
            self._finish(heapq.heappop(self.running))
        self._schedule()


class Run:
    """One run: the pipeline, the engine and a trainer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = clock = Clockwork()
        self.rng = random.Random(0)
        self.lengths = json.loads(LENGTHS.read_text())[WORKLOADS[case.traffic].lengths]["completion_tokens"]
        self.engine = EngineModel(clock, case, self._finish)
        concurrency = Concurrency(case.capacity, GROUP_SIZE) if case.limit is None else None
        settings = PipelineSettings(
            case.steps, case.batch_size, None, 32768, {"env": GROUP_SIZE},
            max_inflight=case.limit if concurrency is None else concurrency.limit,
            engine_slots=case.capacity, max_async_level=case.level,
        )  # fmt: skip
        tasks = [Task("env", {"n": n}) for n in range(1000)]
        held_out = [EvalEnv("held-out", tasks[: case.eval_tasks], 10, 1)] if case.eval_tasks else []
        self.pipeline = Pipeline(
            settings,
            TrainSource([TrainTasks("env", tasks, 1.0)], 0),
            EvalSource(held_out, {"held-out": Version(0, 0)}),
            JournalBuffer(Totals(), Clock(), 0, 0.0),
            Version(0, 0),
            1,
            0.0,
            concurrency=concurrency,
        )
        self.in_flight: dict[int, Episode] = {}
        self.sampled = self.wasted = 0
        self.tokens: dict[tuple[int, int], int] = {}
        """Sampled in each training episode, by draw and index."""
        self.ages: list[int] = []
        self.shipped: deque[int] = deque()
        self.shipped_at: list[float] = []
        self.tails: list[float] = []
        self.lengths_trained: list[int] = []
        self.training = False

    def play(self) -> None:
        self._perform(self.pipeline.start(0.0))
        self._report()
        while not self.pipeline.finished:
            wake_at = self.pipeline.wake_at
            if wake_at is not None and wake_at < self.clock.next_at:
                self.clock.now = max(self.clock.now, wake_at)
                self._handle(signals.Tick())
            else:
                self.clock.pop()()

    def _handle(self, event: signals.Event) -> None:
        self._perform(self.pipeline.handle(event, self.clock.now))

    def _after(self, seconds: float, event: signals.Event) -> None:
        self.clock.after(seconds, lambda: self._handle(event))

    def _report(self) -> None:
        engine = self.engine
        load = len(engine.running), len(engine.waiting), False, self.case.capacity
        health = Health("ok", "0-0", "m", *load, 32768, 1000, waits_for_trainer=engine.is_paused)
        self._handle(signals.Reported({"engine": health}))
        self.clock.after(REPORT_INTERVAL_S, self._report)

    def _perform(self, actions: list[signals.Action]) -> None:
        for action in actions:
            match action:
                case signals.RunEpisode(episode=episode):
                    self._start(episode)
                case signals.CancelEpisode(episode=episode, reason=reason):
                    self._cancel(episode, reason)
                case signals.ProcessGroup():
                    self._after(CREDIT_S, signals.GroupDone(self._credit(action)))
                case signals.ProcessBatch(batch=TrainBatch() as batch):
                    batch.kept = batch.rollouts
                    self._after(BATCH_S / 2, signals.BatchDone(batch))
                case signals.ProcessBatch(batch=EvalBatch() as batch):
                    self._after(BATCH_S / 2, signals.BatchDone(batch))
                case signals.Ship():
                    self.clock.after(BATCH_S / 2, lambda ship=action: self._ship(ship))
                case signals.Load(version=version):
                    self.clock.after(LOAD_S, lambda version=version: self._load(version))

    # -- episodes -------------------------------------------------------------------------------------------------

    def _start(self, episode: Episode) -> None:
        self.in_flight[episode.id] = episode
        length = self.rng.choice(self.lengths)
        self.clock.after(REQUEST_S, lambda: episode.id in self.in_flight and self.engine.submit(episode.id, length))

    def _finish(self, request: Request) -> None:
        episode = self.in_flight.pop(request.episode)
        self.sampled += request.length
        self.tokens[episode.group.draw_id, episode.index] = request.length
        versions = np.array([request.version, self.engine.version], np.int32)
        turn = Turn(np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(2, np.float32), versions, 1.0)
        self._after(REQUEST_S, signals.Arrival(episode, [self._rollout(episode, turns=[turn], reward=1.0)]))

    def _cancel(self, episode: Episode, reason: str) -> None:
        if self.in_flight.pop(episode.id, None) is not None:  # else its arrival is due
            tokens = self.engine.cancel(episode.id)
            self.sampled += tokens
            self.wasted += tokens
            failed = self._rollout(episode, error=RolloutError(reason))
            self._after(REQUEST_S, signals.Arrival(episode, [failed]))

    def _rollout(self, episode: Episode, **fields: object) -> Rollout:
        return Rollout(env=episode.env, draw_id=episode.group.draw_id, episode=episode.index, **fields)

    def _credit(self, action: signals.ProcessGroup) -> ScoredGroup:
        scored = ScoredGroup.of(action.kind, action.group, action.rollouts)
        scored.credited = [("policy", 1.0)] * len(scored.rollouts)
        if action.kind is Kind.TRAIN and random.Random(action.group.draw_id).random() >= self.case.keep:
            scored.dropped += [(rollout, "gated") for rollout in scored.rollouts]
            scored.rollouts = []
        return scored

    # -- the trainer ----------------------------------------------------------------------------------------------

    def _ship(self, ship: signals.Ship) -> None:
        self.shipped_at.append(self.clock.now)
        self.tails.append(ship.metrics["time/tail"])
        self.lengths_trained += [self.tokens[rollout.draw_id, rollout.episode] for rollout in ship.batch.kept]
        self.ages += [staleness(ship.step, rollout.oldest_version) for rollout in ship.batch.kept]
        for rollout, reason in ship.entries.dropped:
            if rollout.error is None and reason != "gated":
                self.wasted += self.tokens[rollout.draw_id, rollout.episode]
        self._handle(signals.Shipped(ship.step))
        self.shipped.append(ship.step)
        self._train_next()

    def _train_next(self) -> None:
        if self.training or not self.shipped:
            return
        self.training = True
        seconds = WORKLOADS[self.case.traffic].train_s
        if self.case.sharing == "alternate":
            self.engine.set_paused(True)
        else:
            self.engine.set_slowdown(2.0)
            seconds *= 2
        self.clock.after(seconds, self._trained)

    def _trained(self) -> None:
        self.training = False
        self.engine.set_paused(False)
        self.engine.set_slowdown(1.0)
        self._handle(signals.Published(Version(0, self.shipped.popleft())))
        self._train_next()

    def _load(self, version: Version) -> None:
        self.engine.version = version.step
        self._handle(signals.Loaded(version))

    def row(self) -> str:
        """Return the figures after the first ten steps of the run, which fill the engine."""
        case, engine = self.case, self.engine
        times = np.diff(self.shipped_at[10:])
        limit = f"{'auto' if case.limit is None else ''} {self.pipeline.scheduler.max_inflight}"
        return (
            f"{case.traffic:10}{case.sharing:10}{case.level:>6}{case.batch_size:>7}{case.capacity:>7}{case.keep:>6.1f}"
            f"{case.eval_tasks:>6}{limit:>10}"
            f"{times.mean():>9.2f}{np.mean(self.tails[11:]):>8.2f}"
            f"{engine.slot_seconds / engine.seconds:>7.2f}{engine.queue_seconds / engine.seconds:>7.2f}"
            f"{np.mean(self.ages):>8.2f}{np.quantile(self.ages, 0.95):>5.0f}{max(self.ages):>5}"
            f"{self.wasted / self.sampled:>8.3f}{np.mean(self.lengths_trained) / np.mean(self.lengths):>8.3f}"
            f"{self.sampled / self.clock.now:>10,.0f}"
        )


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield levels and limits with each kind of sharing, then gates, an evaluation, and more slots than the batch."""
    for traffic in arguments.traffic:
        for sharing in arguments.sharing:
            for level in arguments.level:
                for limit in arguments.limit if level else [None]:
                    yield Case(traffic, sharing, level, limit)
        for level, keep in itertools.product((0, 1), (0.8, 0.5, 0.2)):
            yield Case(traffic, level=level, keep=keep)
        yield Case(traffic, eval_tasks=500)
        for level, batch_size in itertools.product((1, 2, 4), (64, 128)):
            yield Case(traffic, level=level, batch_size=batch_size)
        for level in (1, 2):
            yield Case(traffic, level=level, capacity=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traffic", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--sharing", nargs="+", default=["alternate", "overlap"], choices=["alternate", "overlap"])
    parser.add_argument("--level", nargs="+", type=int, default=[0, 1, 2])
    limits: list[int | None] = [None, 256, 512]
    parser.add_argument("--limit", nargs="+", type=lambda text: None if text == "auto" else int(text), default=limits)
    arguments = parser.parse_args()
    print(f"{'traffic':10}{'sharing':10}{'level':>6}{'batch':>7}{'slots':>7}{'keep':>6}{'evals':>6}", end="")
    print(f"{'in flight':>10}{'step s':>9}{'tail s':>8}{'full':>7}{'queue':>7}{'stale':>8}{'p95':>5}{'max':>5}", end="")
    print(f"{'wasted':>8}{'length':>8}{'tokens/s':>10}")
    for case in cases(arguments):
        run = Run(case)
        run.play()
        print(run.row(), flush=True)


if __name__ == "__main__":
    main()
