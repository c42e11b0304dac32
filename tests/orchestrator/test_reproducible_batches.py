"""At level 0 what is trained is a function of the seed: who is slow decides nothing."""

import random
from pathlib import Path

import numpy as np
import pytest

from headrace.inference.schema import Health
from headrace.orchestrator.concurrency import Concurrency
from headrace.orchestrator.empty_batches import RunFailed
from headrace.orchestrator.evaluation import EvalSource
from headrace.orchestrator.journal_buffer import JournalBuffer
from headrace.orchestrator.pipeline import Pipeline, PipelineSettings
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
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import DrawResult

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

    def __init__(self, setup: str, timing: int, *, reports: bool = False, tokens_before: int = 0, **more: int) -> None:
        given = {"batch_size": None, "token_batch_size": None, "max_inflight": 64, **SETUPS[setup], **more}
        settings = PipelineSettings(max_steps=4, seq_len=32, max_async_level=0, **given)
        tasks = [TrainTasks(env, [Task(env, {"n": n}) for n in range(20)], 1.0) for env in settings.group_sizes]
        journal = Journal(Path(":memory:"))
        buffer = JournalBuffer(journal.totals(), journal.clock(), journal.next_credit(), 0.0)
        past = (
            [DrawResult(0, "a", "an earlier process", [0.0] * 4, step=1, tokens=tokens_before)] if tokens_before else []
        )
        concurrency = Concurrency(settings.max_inflight, 8) if reports else None
        self.pipeline = Pipeline(
            *(settings, TrainSource(tasks, 5), EvalSource([], {}), buffer, Version(0, 0), 1, 0.0),
            concurrency=concurrency,
            past=past,
        )
        self.reports = reports
        self.limits: set[int] = set()
        self.setup = setup
        self.random = random.Random(timing)
        self.inflight: list[Episode] = []
        self.batches: list[list[int]] = []
        self.credited: list[int] = []
        self.first_waves: dict[int, int] = {}
        """By step, the episodes that it began with."""

    def play(self) -> list[list[int]]:
        """The draws of each batch."""
        actions, now = self.pipeline.start(0.0), 0.0
        while not self.pipeline.finished:
            now += 1.0
            events = [event for action in actions for event in self.carry_out(action)]
            if not events and self.inflight:
                self.first_waves.setdefault(self.pipeline.step, len(self.inflight))
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
                lost = self.loses(action.group.draw_id)
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

    def loses(self, draw: int) -> bool:
        return self.setup == "every fifth group lost" and draw % 5 == 3

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


def test_at_level_0_every_step_but_the_first_begins_with_what_a_batch_by_tokens_takes():
    world = World("batches by tokens", timing=0)
    world.play()
    first, *others = world.first_waves.values()
    assert first == 12  # 300 tokens, should all be 32 long, in groups of 4
    assert len(others) == 3
    assert all(24 <= wave <= 32 for wave in others)  # they are 4 to 20 long


def test_a_run_that_goes_on_knows_the_lengths_that_earlier_processes_have_seen():
    world = World("batches by tokens", timing=0, tokens_before=4 * 15)
    world.play()
    assert world.first_waves[1] == 20  # 300 tokens, 15 each


def test_a_batch_by_tokens_is_empty_when_as_many_rollouts_are_lost_as_one_takes():
    class Fruitless(World):
        def loses(self, draw: int) -> bool:
            return True

    world = Fruitless("batches by tokens", timing=0, max_empty_batches=2)
    with pytest.raises(RunFailed, match=r"^2 empty batches in a row"):
        world.play()
    assert 12 <= len(world.credited) <= 16  # 300 tokens are some 25 rollouts of 4 to 20: 6 to 8 groups of 4
