"""A run in simulated time: the real pipeline, processing and journal, with everything around them played from a seed.

Episodes take random times and fail in random ways, credit and batches take time, the disk writes one thing after the
other, the trainer trains, crashes and comes back from an older checkpoint, the orchestrator is killed or stopped and
started again. `Simulation(seed).run()` plays one run to its end and checks, after every event, what must always hold.
At level 0 an episode comes to the same whenever it is played, as it does with an engine that is given seeds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.algorithms.base import Algorithm
from headrace.algorithms.grpo import Grpo
from headrace.environments.base import Environment
from headrace.inference.schema import Health
from headrace.orchestrator.concurrency import Concurrency
from headrace.orchestrator.curriculum import DifficultyPool
from headrace.orchestrator.evaluation import EvalEnv, EvalSource
from headrace.orchestrator.filters import has_no_advantage
from headrace.orchestrator.gate import AdvantageRange
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
from headrace.orchestrator.processing import EvalProcessing, Filter, TrainProcessing
from headrace.orchestrator.signals import (
    Action,
    Arrival,
    BatchDone,
    CancelEpisode,
    Commit,
    Episode,
    Event,
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
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import NOT_SAMPLED, Rollout, RolloutError, Task, Turn
from headrace.rollout.version import Version, staleness
from headrace.tools.audit import AuditReport, compare_draws
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import NOT_TRAINABLE, Entries

DEADLINE = 90 * 86400.0
"""Simulated seconds within which every run must end."""


class RunningBaseline(Algorithm):
    """Credit against an average of all rewards so far: a state that depends on every group and on their order."""

    def __init__(self) -> None:
        self.baselines: dict[str, float] = {}

    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward - self.learn(rollout.rollout.agent, rollout.reward))

    def learn(self, agent: str, reward: float) -> float:
        before = self.baselines.get(agent, 0.0)
        self.baselines[agent] = 0.95 * before + 0.05 * reward
        return before

    def state(self):
        return self.baselines

    def load_state(self, state):
        self.baselines = state


class Taught(Algorithm):
    """Needs another model at the last moment, which is not always there."""

    action_loss_type = "ce"

    def __init__(self, seed: int, failure_rate: float) -> None:
        self.seed = seed
        self.failure_rate = failure_rate

    async def score_batch(self, batch):
        for place, survivor in enumerate(batch):
            chance = random.Random(f"{self.seed}-{survivor.rollout.draw_id}-{place}")
            if chance.random() < self.failure_rate:
                survivor.drop("no_reference", "as the seed wanted")


class ScoredTogether(Environment):
    async def score_group(self, rollouts):
        for place, rollout in enumerate(rollouts):
            rollout.rewards = {"place": float(place % 2)}


class Simulation:
    """`kills`: how often the orchestrator is killed on the way. `pace`: seconds that a unit of work takes.

    Of the training environments one has a stateless algorithm, one a stateful one, one a curriculum with a gate; with
    some seeds that one always fails. `on_policy`: at level 0, whatever the seed is.
    """

    def __init__(
        self, seed: int, kills: int = 0, max_steps: int | None = None, pace: float = 1.0, *, on_policy: bool = False
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now = 1000.0
        self.pace = pace
        self.settings = self._settings()
        if on_policy:
            self.settings.max_async_level = 0
        self.eval_envs = self._eval_envs()
        if max_steps is not None:
            self.settings.max_steps = max_steps
        self.weights = {"plain": 2.0, "stateful": 1.0, "pooled": 1.0}
        self.tasks = {env: [Task(env, {"n": n}) for n in range(rng.choice([3, 20]))] for env in self.weights}
        self.journal = Journal(Path(":memory:"))
        self.failure_rate = rng.choice([0.0, 0.05, 0.3])
        self.equal_rewards = rng.choice([0.0, 0.5, 0.9])
        self.two_agents = rng.choice([0.0, 0.0, 0.5])
        self.early_filter = rng.random() < 0.3
        self.broken = rng.random() < 0.15
        self.trainer = _Trainer(self, crash_rate=rng.choice([0.0, 0.1, 0.3]))
        self.engine = Version(0, 0)
        self.evaluated: dict[str, Version] = {}
        self.kills = kills
        self.processes = 0
        self.shipped: dict[int, list[int]] = {}
        self.saved: dict[int, Counter[str]] = {}
        """By draw, the rollouts that were written with the commit of its outcome, by drop reason; empty: shipped."""
        self.groups: set[str] = set()
        """Of training, over all processes."""
        self.evals_opened = self.evals_closed = 0
        self.reports = random.Random(seed) if seed % 4 == 0 and not self.settings.frozen else None
        """What the engines report where the limit on episodes follows them; apart, so that all else is as without."""
        self.agenda: list[tuple[float, int, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.numbers = itertools.count()

    def _settings(self) -> PipelineSettings:
        rng = self.rng
        size = rng.choice([1, 2, 4])
        by_tokens = rng.random() < 0.25
        level = rng.choice([0, 1, 1, 3])
        return PipelineSettings(
            max_steps=rng.randint(1, 6),
            batch_size=None if by_tokens else size * rng.randint(1, 5),
            token_batch_size=rng.randint(5, 120) if by_tokens else None,
            seq_len=12,
            group_sizes={"plain": size, "stateful": rng.choice([1, size]), "pooled": size},
            max_inflight=rng.randint(size, 4 * size + 6),
            max_async_level=level,
            max_off_policy_steps=level + rng.choice([0, 1, 8]),
            tasks_per_minute=rng.choice([None, None, 6.0, 600.0]),
            scored_together=frozenset({"plain"} if rng.random() < 0.3 else ()),
            frozen=frozenset({"plain"} if rng.random() < 0.2 else ()),
        )

    def _eval_envs(self) -> list[EvalEnv]:
        rng = self.rng
        return [
            EvalEnv(
                name,
                [Task(name, {"n": n}) for n in range(rng.randint(1, 8))],
                interval=rng.randint(1, 4),
                group_size=rng.randint(1, self.settings.max_inflight),
                pinned=rng.random() < 0.3,
                together=rng.random() < 0.3,
            )
            for name in ("heldout", "harder")[: rng.randint(0, 2)]
        ]

    # -- the world's clock ----------------------------------------------------------------------------------------

    def at(self, time: float, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        heapq.heappush(self.agenda, (time, next(self.numbers), what))

    def after(self, mean: float, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.at(self.now + self.pace * self.rng.expovariate(1 / mean), what)

    async def run(self) -> None:
        process = self._start_process()
        for _ in range(self.kills):
            self.after(20.0, lambda: self._end_process())
        while not process.finished:
            process = self.process
            wake_at = process.pipeline.wake_at
            due = self.agenda[0][0] if self.agenda else math.inf
            if wake_at is not None and wake_at <= due:
                self.now = max(self.now, wake_at)
                await process.handle(Tick())
                continue
            assert self.agenda, f"nothing will ever happen again; waiting for {process.pipeline.awaited()}"
            self.now, _, what = heapq.heappop(self.agenda)
            assert self.now < DEADLINE, f"no end in sight; waiting for {process.pipeline.awaited()}"
            await what()
            process = self.process
        await process.finish()

    def train_tasks(self) -> list[TrainTasks]:
        """As each process loads them."""
        weights = {"unseen": 1.0, "hard": 0.2, "normal": 1.0, "easy": 0.2}
        pools = DifficultyPool(self.tasks["pooled"], 0.25, 0.75, weights)
        samplers = {"pooled": pools}
        return [TrainTasks(env, self.tasks[env], self.weights[env], samplers.get(env)) for env in self.weights]

    def _start_process(self) -> _Process:
        self.processes += 1
        self.process = _Process(self)
        return self.process

    async def _end_process(self) -> None:
        """Kill the orchestrator, or stop it in order; either way another takes its place."""
        if self.process.finished:
            return
        if self.rng.random() < 0.3:
            await self.process.handle(Stop())
            assert self.process.pipeline.finished
            await self.process.close()
        self.process.alive = False
        self._start_process()

    # -- what the end must look like ------------------------------------------------------------------------------

    def check_end(self) -> None:
        settings, journal = self.settings, self.journal
        assert journal.last_step() == settings.max_steps
        assert list(self.shipped) == list(range(1, settings.max_steps + 1))
        assert self.trainer.trained == settings.max_steps
        in_batches = Counter(draw for draws in self.shipped.values() for draw in draws)
        assert set(in_batches.values()) <= {1}
        fresh = TrainSource(self.train_tasks(), 0)
        for draw, state, step, reason in journal.draws():
            again = fresh.draw()[0]
            if draw.env == "pooled":  # which task it is depends on what came before
                again = msgspec.structs.replace(again, task_key=draw.task_key, observed=draw.observed)
            assert draw == again or self.broken, "an uninterrupted run would have drawn another prompt"
            assert state in ("shipped", "dropped")
            assert (state == "shipped") == (draw.id in in_batches)
            if state == "shipped":
                assert draw.id in self.shipped[step]
            else:
                assert reason
        for step, totals in journal.totals_by_step().items():
            assert totals == journal.totals(through=step)
        replayed = RunningBaseline()
        for _, env, rewards in journal.credits():
            if env == "stateful":
                for agent, reward in rewards:
                    replayed.learn(agent, reward)
        self._check_curriculum()
        self._check_saved()
        stored = journal.algorithm_states().get("stateful")
        assert (msgspec.json.decode(stored.json) if stored else {}) == replayed.state()

    def _check_saved(self) -> None:
        """Every rollout that the journal counts was written with the commit that counts it."""
        for outcomes in self.journal.outcomes().values():
            for outcome in outcomes:
                saved = self.saved.get(outcome.draw, Counter())
                assert saved.total() == outcome.rollouts
                assert {reason: count for reason, count in saved.items() if reason not in ("", NOT_TRAINABLE)} == (
                    outcome.drops
                )

    def _check_curriculum(self) -> None:
        """Its state is a fold over the journal, and every draw follows from what its sampler had observed."""
        report = AuditReport()
        compare_draws(self.train_tasks(), 0, self.journal, report)
        assert report.problems == []
        folded, live = TrainSource(self.train_tasks(), 0), self.process.source
        for result in self.journal.results():
            folded.add_result(result)
        for source in (folded, live):
            source.learn()
        assert folded.metrics() == live.metrics()


class _Trainer:
    """Trains shipped batches in order; after a crash, from an older checkpoint under a higher incarnation."""

    def __init__(self, world: Simulation, crash_rate: float) -> None:
        self.world = world
        self.crash_rate = crash_rate
        self.checkpoint_interval = world.rng.choice([1, 2, 5])
        self.trained = 0
        self.incarnation = 0
        self.busy = False

    def look(self) -> None:
        if not self.busy and self.trained + 1 in self.world.shipped:
            self.busy = True
            self.world.after(5.0, self._finish)

    async def _finish(self) -> None:
        self.busy = False
        if self.world.rng.random() < self.crash_rate:
            self.incarnation += 1
            self.trained -= self.trained % self.checkpoint_interval
        else:
            self.trained += 1
        await self.world.process.handle(Published(Version(self.incarnation, self.trained)))
        self.look()


class _Process:
    """One process of the orchestrator: its pipeline, and what performs its actions."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.rng = world.rng
        self.alive = True
        journal, settings = world.journal, world.settings
        self.on_policy = settings.max_async_level == 0
        if self.on_policy:
            journal.rewind(journal.last_step(), keep_clock=True)
        self.recorded = {draw.id: draw.task_key for draw, *_ in journal.draws()}
        stateful = RunningBaseline()
        if states := journal.algorithm_states():
            stateful.load_state(msgspec.json.decode(states["stateful"].json))
        environments: dict[str, Environment] = {
            env: ScoredTogether() if env in settings.scored_together else Environment() for env in world.tasks
        }
        no_signal = [Filter("zero_advantage", has_no_advantage, enforce=True)]
        self.processing = TrainProcessing(
            {
                "plain": Taught(world.seed, world.failure_rate) if "plain" in settings.frozen else Grpo(),
                "stateful": stateful,
                "pooled": Grpo(),
            },
            environments,
            no_signal if world.early_filter else [],
            no_signal,
            settings.seq_len,
            gates={"pooled": AdvantageRange(-0.1, 0.1)},
        )
        evals: dict[str, Environment] = {
            env.name: ScoredTogether() if env.together else Environment() for env in world.eval_envs
        }
        self.eval_processing = EvalProcessing(evals)
        self.source = TrainSource(world.train_tasks(), 0, journal.drawn_per_env(), journal.open_draws())
        self.pipeline = Pipeline(
            settings,
            self.source,
            EvalSource(world.eval_envs, world.evaluated),
            JournalBuffer(journal.totals(), journal.clock(), journal.next_credit(), world.now),
            world.engine,
            journal.last_step() + 1,
            world.now,
            journal.start(),
            None if world.reports is None else self._follow_reports(world.reports),
            journal.results(),
        )
        self.handed_in: deque[ProcessGroup] = deque()
        self.running: dict[int, Episode] = {}
        self.arrived: set[int] = set()
        self.started_at: dict[int, Version] = {}
        self.cancelled: dict[int, str] = {}
        self.on_disk: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self.disk_free_at = world.now
        self.began = world.now
        self.groups_begun = 0
        self.carry_out(self.pipeline.start(world.now))
        newest = Version(world.trainer.incarnation, world.trainer.trained)
        if newest > world.engine:  # what a watcher sees when it first looks
            world.after(0.1, lambda: self.handle(Published(newest)))

    def _follow_reports(self, rng: random.Random) -> Concurrency:
        """Now and then engines say how they are, whatever they are really doing."""
        settings = self.world.settings
        sizes = [*settings.group_sizes.values(), *(env.group_size for env in self.world.eval_envs)]
        concurrency = Concurrency(rng.randint(1, 8), max(sizes))
        settings.max_inflight = concurrency.limit

        async def report() -> None:
            if self.alive and not self.finished:
                load = rng.randint(0, 8), rng.choice([0, 0, 20]), rng.random() < 0.2
                self.world.at(self.world.now + self.world.pace * rng.uniform(0.1, 4.0), report)
                await self.handle(Reported({"a": Health("ok", "0-0", "m", *load, 8, 64, 300, kv_usage=rng.random())}))

        self.world.at(self.world.now, report)
        return concurrency

    @property
    def finished(self) -> bool:
        return self.pipeline.finished

    async def handle(self, event: Event) -> None:
        if not self.alive or self.finished:
            return
        self.carry_out(self.pipeline.handle(event, self.world.now))
        scheduler = self.pipeline.scheduler
        assert scheduler.free_slots == max(0, scheduler.max_inflight - len(self.running))
        assert sum(scheduler.inflight.values()) == len(self.running)

    async def finish(self) -> None:
        """The end of a run: what is left in the journal buffer, and whatever is still open, goes into the journal."""
        assert not self.running
        assert self.pipeline.evals.open_evals == 0
        await self.close()
        self.world.journal.drop_open("max_steps")

    async def close(self) -> None:
        """The disk finishes what it was given, then takes what may be committed of the rest."""
        while self.on_disk:
            await self.on_disk.popleft()()
        await self._commit(self.pipeline.buffer.take_entries(self.world.now))

    # -- hands ----------------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RunEpisode():
                    self._start(action.episode)
                case CancelEpisode():
                    assert action.episode.id in self.running
                    assert action.reason != "off_policy" or action.episode.env not in self.world.settings.frozen
                    self.cancelled.setdefault(action.episode.id, action.reason)
                    self.world.after(0.05, lambda episode=action.episode: self._arrive(episode))
                case ProcessGroup():
                    if self.on_policy and action.kind is Kind.TRAIN:  # credited as they were handed in
                        self.handed_in.append(action)
                        self.world.after(0.2, lambda: self._process_group(self.handed_in.popleft()))
                    else:
                        self.world.after(0.2, lambda action=action: self._process_group(action))
                case ProcessBatch():
                    self.world.after(1.0, lambda batch=action.batch: self._process_batch(batch))
                case Ship():
                    self._check_ship(action)
                    self._on_disk(lambda ship=action: self._ship(ship))
                case Commit():
                    self._on_disk(lambda entries=action.entries: self._commit(entries))
                case Load():
                    self.world.after(0.5, lambda version=action.version: self._load(version))
                case ReportEval():
                    self._check_eval(action)

    def _start(self, episode: Episode) -> None:
        assert episode.id not in self.running
        self.running[episode.id] = episode
        assert len(self.running) <= self.pipeline.scheduler.max_inflight
        self.started_at[episode.id] = self.world.engine
        if episode.index == 0:
            self.groups_begun += 1
            if episode.kind is Kind.TRAIN:
                group = episode.group
                assert self.recorded.get(group.draw_id, group.task.key) == group.task.key
                assert episode.group.id not in self.world.groups
                self.world.groups.add(episode.group.id)
            self._check_rate()
        seconds = self.world.pace * self.rng.lognormvariate(0.7, 1.0)
        self.world.at(self.world.now + seconds, lambda: self._arrive(episode))

    async def _arrive(self, episode: Episode) -> None:
        if episode.id not in self.running or not self.alive:  # cancelled before it was done, or the other way round
            return
        del self.running[episode.id]
        assert episode.id not in self.arrived
        self.arrived.add(episode.id)
        rng = random.Random(f"{self.world.seed}-{episode.name}") if self.on_policy else self.rng
        rollouts = [self._rollout(episode, rng)]
        if episode.kind is Kind.TRAIN and rollouts[0].error is None and rng.random() < self.world.two_agents:
            rollouts.append(self._rollout(episode, rng))
            rollouts[1].agent, rollouts[1].trainable = "other", rng.random() < 0.7
        for rollout in rollouts if episode.kind is Kind.TRAIN else ():
            await self.processing.process_rollout(rollout, episode.group.task)
        await self.handle(Arrival(episode, rollouts))

    def _rollout(self, episode: Episode, rng: random.Random) -> Rollout:
        group = episode.group
        stamps = {"task_key": group.task.key, "group_id": group.id, "draw_id": group.draw_id, "episode": episode.index}
        rollout = Rollout(env=episode.env, **stamps)
        reason = self.cancelled.get(episode.id)
        fails = rng.random() < self.world.failure_rate or (self.world.broken and episode.env == "pooled")
        if reason is None and fails:
            reason = rng.choice(["timeout", "environment", "engine", "empty", "invalid_reward"])
        if reason is not None:
            rollout.error = RolloutError(reason, "as the seed wanted")
            return rollout
        count = rng.randint(1, 8)
        split = rng.randint(1, count)
        versions = [self.started_at[episode.id].step] * split + [self.world.engine.step] * (count - split)
        if episode.kind is Kind.TRAIN and episode.env in self.world.settings.frozen:
            versions = [NOT_SAMPLED] * count
        rollout.turns = [Turn([1, 2], [3] * count, [-1.0] * count, versions, 1.0)]
        rollout.reward = 1.0 if rng.random() < self.world.equal_rewards else float(rng.randint(0, 1))
        rollout.rewards = {"r": rollout.reward}
        return rollout

    async def _process_group(self, action: ProcessGroup) -> None:
        if self.alive:
            levels = self.processing if action.kind is Kind.TRAIN else self.eval_processing
            await self.handle(GroupDone(await levels.process_group(action.group, action.rollouts)))

    async def _process_batch(self, batch: Any) -> None:
        if self.alive:
            levels: Any = self.processing if isinstance(batch, TrainBatch) else self.eval_processing
            await levels.process_batch(batch)
            await self.handle(BatchDone(batch))

    async def _load(self, version: Version) -> None:
        if self.alive:
            self.world.engine = version
            await self.handle(Loaded(version))

    def _on_disk(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One thread writes, in order. What has not been written when the process dies never is."""
        self.disk_free_at = max(self.disk_free_at, self.world.now) + self.rng.expovariate(20.0)

        async def write() -> None:
            if self.alive and self.on_disk:
                await self.on_disk.popleft()()

        self.on_disk.append(work)
        self.world.at(self.disk_free_at, write)

    async def _ship(self, ship: Ship) -> None:
        self._save(ship.entries, ship.batch.kept)
        self.world.journal.commit(ship.entries, shipped=ship.step)
        assert ship.step not in self.world.shipped
        self.world.shipped[ship.step] = list(dict.fromkeys(rollout.draw_id for rollout in ship.batch.kept))
        self.world.trainer.look()
        await self.handle(Shipped(ship.step))

    async def _commit(self, entries: Entries) -> None:
        self._save(entries)
        self.world.journal.commit(entries)

    def _save(self, entries: Entries, kept: Sequence[Rollout] = ()) -> None:
        for outcome in entries.outcomes:  # of a step that is repeated, the last counts
            self.world.saved[outcome.draw] = Counter()
        for rollout, reason in [*((rollout, "") for rollout in kept), *entries.dropped]:
            self.world.saved[rollout.draw_id][reason] += 1

    # -- what must hold at every step -----------------------------------------------------------------------------

    def _check_ship(self, ship: Ship) -> None:
        settings, batch = self.world.settings, ship.batch
        assert self.pipeline.version.step >= ship.step - 1 - settings.max_async_level
        for rollout in batch.kept:
            assert rollout.error is None
            assert (rollout.oldest_version is None) == (rollout.env in settings.frozen)
            age = 0 if rollout.oldest_version is None else staleness(ship.step, rollout.oldest_version)
            assert age <= (settings.max_off_policy_steps if settings.max_async_level else 0)
        slots = [len(group.rollouts) for group in batch.groups]
        tokens = [group.tokens for group in batch.groups]
        filled, size = (
            (slots, settings.batch_size) if settings.batch_size is not None else (tokens, settings.token_batch_size)
        )
        assert sum(filled) >= size > sum(filled[:-1])
        sealed = {outcome.draw for outcome in ship.entries.outcomes if not outcome.reason}
        assert sealed == {rollout.draw_id for rollout in batch.kept}

    def _check_eval(self, report: ReportEval) -> None:
        batch = report.batch
        before = self.world.evaluated.get(batch.env, batch.version)
        self.world.evaluated[batch.env] = max(before, batch.version)
        (env,) = [env for env in self.world.eval_envs if env.name == batch.env]
        assert len(batch.groups) == len(env.tasks)
        assert all(group.arrived == env.group_size for group in batch.groups)
        if env.pinned and any(group.rollouts for group in batch.groups):
            prefix = f"eval/{batch.env}/version"
            assert batch.metrics[f"{prefix}/min"] == batch.metrics[f"{prefix}/max"] == batch.version.step

    def _check_rate(self) -> None:
        limit = self.world.settings.tasks_per_minute
        if limit is not None:
            assert self.groups_begun <= 1 + (self.world.now - self.began) * limit / 60 + 1e-6
