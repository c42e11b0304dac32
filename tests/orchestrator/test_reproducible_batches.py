"""At level 0 what is trained is a function of the seed: who is slow decides nothing."""

import random
from pathlib import Path

import numpy as np
import pytest

from headrace.inference.schema import Health
from headrace.orchestrator.concurrency import Concurrency
from headrace.orchestrator.evaluation import EvalSource
from headrace.orchestrator.journal import Journal
from headrace.orchestrator.ledger import Ledger
from headrace.orchestrator.pipeline import Pipeline
from headrace.orchestrator.settings import Settings
from headrace.orchestrator.signals import (
    Action,
    Arrival,
    BatchDone,
    Episode,
    Event,
    GroupDone,
    Load,
    Loaded,
    ProcessBatch,
    ProcessGroup,
    Published,
    Reported,
    RunEpisode,
    ScoredGroup,
    Ship,
    Shipped,
    Tick,
)
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.types import Rollout, Sample, Task
from headrace.rollout.version import Version

SETUPS = {
    "one environment": {"group_sizes": {"a": 4}, "batch_size": 16},
    "groups of two sizes": {"group_sizes": {"a": 8, "b": 2}, "batch_size": 16},
    "few permits": {"group_sizes": {"a": 8, "b": 2}, "batch_size": 16, "max_inflight": 5},
    "two rollouts per episode": {"group_sizes": {"a": 4}, "batch_size": 16},
    "batches by tokens": {"group_sizes": {"a": 4}, "token_batch_size": 300},
    "every fifth group lost": {"group_sizes": {"a": 4}, "batch_size": 16},
}


class World:
    """Plays the rest of the run; `timing` decides the order in which episodes end, and nothing else.

    With `reports` engines say now and then how they are, and the limit on episodes follows.
    """

    def __init__(self, setup: str, timing: int, *, reports: bool = False) -> None:
        given = {"batch_size": None, "token_batch_size": None, "max_inflight": 64, **SETUPS[setup]}
        settings = Settings(max_steps=4, seq_len=32, max_async_level=0, **given)
        tasks = [TrainTasks(env, [Task(env, {"n": n}) for n in range(20)], 1.0) for env in settings.group_sizes]
        journal = Journal(Path(":memory:"))
        ledger = Ledger(journal.totals(), journal.clock(), journal.next_credit(), 0.0)
        concurrency = Concurrency(settings.max_inflight, 8) if reports else None
        self.pipeline = Pipeline(
            *(settings, TrainSource(tasks, 5), EvalSource([], {}), ledger, Version(0, 0), 1, 0.0),
            concurrency=concurrency,
        )
        self.reports = reports
        self.limits: set[int] = set()
        self.setup = setup
        self.random = random.Random(timing)
        self.inflight: list[Episode] = []
        self.batches: list[list[int]] = []
        self.credited: list[int] = []

    def play(self) -> list[list[int]]:
        """The draws of each batch."""
        actions, now = self.pipeline.start(0.0), 0.0
        while not self.pipeline.finished:
            now += 1.0
            events = [event for action in actions for event in self.carry_out(action)]
            if not events and self.inflight:
                episode = self.inflight.pop(self.random.randrange(len(self.inflight)))
                events = [Arrival(episode, self.rollouts_of(episode)), *self.report()]
            actions = [action for event in events or [Tick()] for action in self.pipeline.handle(event, now)]
        return self.batches

    def report(self) -> list[Event]:
        if not self.reports:
            return []
        self.limits.add(self.pipeline.scheduler.max_inflight)
        kv_usage = self.random.choice([0.0, 1.0])
        return [Reported({"a": Health("ok", "0-0", "m", 0, 0, False, 8, 64, 300, kv_usage=kv_usage)})]

    def carry_out(self, action: Action) -> list[Event]:
        match action:
            case RunEpisode():
                self.inflight.append(action.episode)
            case ProcessGroup():
                self.credited.append(action.group.draw_id)
                lost = self.setup == "every fifth group lost" and action.group.draw_id % 5 == 3
                kept = [] if lost else action.rollouts
                dropped = [(rollout, "zero_advantage") for rollout in action.rollouts] if lost else []
                scored = ScoredGroup(action.kind, action.group, kept, dropped, arrived=len(action.rollouts))
                scored.credited = [("", 0.0) for _ in action.rollouts]
                return [GroupDone(scored)]
            case ProcessBatch():
                action.batch.kept = action.batch.rollouts
                return [BatchDone(action.batch)]
            case Ship():
                self.batches.append([group.group.draw_id for group in action.batch.groups])
                return [Shipped(action.step), Published(Version(0, action.step))]
            case Load():
                return [Loaded(action.version)]
        return []

    def rollouts_of(self, episode: Episode) -> list[Rollout]:
        content = random.Random(episode.name)
        count = 2 if self.setup == "two rollouts per episode" else 1
        return [self.rollout(episode, content.randint(4, 20)) for _ in range(count)]

    def rollout(self, episode: Episode, length: int) -> Rollout:
        versions = np.full(length, self.pipeline.version.step)
        sample = Sample(np.zeros(length, np.int32), np.ones(length, np.bool_), np.zeros(length), versions, 1)
        return Rollout(env=episode.env, draw_id=episode.group.draw_id, reward=0.0, samples=[sample])


@pytest.mark.parametrize("setup", SETUPS)
def test_at_level_0_who_is_slow_does_not_decide_what_is_trained(setup: str):
    first = World(setup, timing=0).play()
    assert len(first) == 4
    assert all(World(setup, timing).play() == first for timing in range(1, 20))


@pytest.mark.parametrize("setup", SETUPS)
def test_at_level_0_a_limit_that_follows_the_engines_does_not_decide_what_is_trained(setup: str):
    first = World(setup, timing=0).play()
    for timing in range(1, 8):
        world = World(setup, timing, reports=True)
        assert world.play() == first
        assert len(world.limits) > 1


@pytest.mark.parametrize("setup", SETUPS)
def test_at_level_0_groups_are_credited_in_the_order_in_which_they_were_drawn(setup: str):
    for timing in range(8):
        world = World(setup, timing)
        world.play()
        assert world.credited == list(range(len(world.credited)))
