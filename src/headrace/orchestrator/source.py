"""Training prompts: an endless weighted draw over the environments, reproducible from the seed.

Draw i picks an environment from (seed, i) among those that are not paused; the environment's sampler picks the task
(without a curriculum: a new permutation for each pass). The state is a fold over the outcomes of earlier draws
(`Lesson`), so a resumed run continues identically. Open draws of an earlier process come first and keep their ids.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from headrace.orchestrator.circuit_breaker import EnvironmentBreaker
from headrace.orchestrator.curriculum import CheckedSampler, Shuffled, TaskSampler
from headrace.orchestrator.signals import ScoredGroup
from headrace.rollout.types import Task
from headrace.transport.journal import GROUP_FAILED, Draw, Lesson

log = logging.getLogger(__name__)


class TrainTasks(msgspec.Struct):
    """Tasks of one training environment and how they are drawn."""

    env: str
    tasks: Sequence[Task]
    weight: float
    sampler: TaskSampler | None = None
    """None: `Shuffled`."""


class TrainSource:
    """Draws training prompts. `drawn` counts the draws of earlier processes by environment."""

    def __init__(
        self,
        environments: Iterable[TrainTasks],
        seed: int,
        drawn: dict[str, int] | None = None,
        open_draws: Iterable[Draw] = (),
    ) -> None:
        self._seed = seed
        self._weights: dict[str, float] = {}
        self._samplers: dict[str, CheckedSampler] = {}
        for entry in environments:
            if not entry.tasks:
                raise ValueError(f"environment {entry.env!r} has no tasks to train on")
            sampler = entry.sampler or Shuffled(entry.tasks, f"{seed}-{entry.env}")
            self._weights[entry.env] = entry.weight
            self._samplers[entry.env] = CheckedSampler(entry.env, entry.tasks, sampler, f"{seed}-{entry.env}")
        self._drawn = {name: (drawn or {}).get(name, 0) for name in self._samplers}
        self._next_id = sum((drawn or {}).values())
        self._breaker = EnvironmentBreaker()
        self._pending: list[Lesson] = []
        self._reopened: deque[tuple[Draw, Task]] = deque()
        self.missing: list[Draw] = []
        """Open draws whose environment or task no longer exists: they can only be dropped."""
        for draw in open_draws:
            task = self._samplers[draw.env].find(draw.task_key) if draw.env in self._samplers else None
            if task is None:
                self.missing.append(draw)
            else:
                self._reopened.append((draw, task))

    def draw(self) -> tuple[Draw, Task]:
        draw, task = self._reopened.popleft() if self._reopened else self._new_draw()
        self._breaker.record_draw(draw.env, draw.id)
        return draw, task

    def add_lesson(self, lesson: Lesson) -> None:
        """Queue the outcome of a draw. Draws do not depend on it before `learn`."""
        self._pending.append(lesson)

    def learn(self) -> None:
        """Apply the queued lessons in order: later draws depend on them."""
        for lesson in self._pending:
            if lesson.env in self._samplers:
                self._learn_from(lesson)
        self._pending.clear()

    def metrics(self) -> dict[str, float]:
        return {name: value for sampler in self._samplers.values() for name, value in sampler.metrics().items()}

    def _new_draw(self) -> tuple[Draw, Task]:
        active = [name for name in self._samplers if not self._breaker.is_paused(name, self._next_id)]
        names = active or list(self._samplers)
        weights = [self._weights[name] for name in names]
        env = random.Random(f"{self._seed}-{self._next_id}").choices(names, weights)[0]
        task = self._samplers[env].draw(self._drawn[env])
        draw = Draw(self._next_id, env, task.key, self._drawn[env])
        self._drawn[env] += 1
        self._next_id += 1
        return draw, task

    def _learn_from(self, lesson: Lesson) -> None:
        env, breaker = lesson.env, self._breaker
        if lesson.rewards:
            self._samplers[env].observe(lesson.task_key, lesson.rewards)
            if breaker.record_success(env, lesson.draw):
                log.warning("environment %r works again: it is drawn as often as before", env)
        elif not lesson.failed:
            breaker.record_cancelled(env, lesson.draw)
        else:
            pause = breaker.record_failure(env, lesson.draw, lesson.failed)
            if pause and lesson.story and len(self._samplers) > 1:
                message = "environment %r only fails (%s): paused for the next %d draws, then tried again once"
                log.warning(message, env, lesson.story, pause)


def lesson_of(scored: ScoredGroup, step: int) -> Lesson:
    """Return the outcome of a finished training group for the source."""
    task = scored.group.task
    rewards = [reward for _, reward in scored.credited]
    lesson = Lesson(scored.group.draw_id, task.env, task.key, rewards, step=step, tokens=scored.credited_tokens)
    errors = [rollout.error for rollout, _ in scored.dropped if rollout.error is not None]
    if not scored.reason and len(errors) == scored.arrived and all(error.reason != GROUP_FAILED for error in errors):
        lesson.failed = scored.arrived
        lesson.story = f"{errors[-1].reason}: {errors[-1].detail}"
    return lesson
