"""Where training prompts come from: an endless weighted draw over the environments, the same for the same seed.

Draw i picks an environment from (seed, i), among those that do not rest; which of its tasks is its sampler's choice.
Without a curriculum that is a permutation made anew for each pass. All that the source knows is a fold over what became
of earlier draws (`Lesson`), so that a resumed run goes on as it would have. Draws that were made are never made anew:
those that are open come first, with their ids and their tasks.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from headrace.orchestrator.circuit import Circuit
from headrace.orchestrator.curriculum import Shuffled, Tasks, TaskSampler
from headrace.orchestrator.signals import ScoredGroup
from headrace.rollout.types import Task
from headrace.transport.journal import GROUP_FAILED, Draw, Lesson

log = logging.getLogger(__name__)


class TrainTasks(msgspec.Struct):
    """One training environment as the source sees it."""

    env: str
    tasks: Sequence[Task]
    weight: float
    sampler: TaskSampler | None = None
    """None: every task once before any comes again."""


class TrainSource:
    """`open_draws` are prompts that an earlier process drew and did not finish: they come first, with their ids."""

    def __init__(
        self,
        environments: Iterable[TrainTasks],
        seed: int,
        drawn: dict[str, int] | None = None,
        open_draws: Iterable[Draw] = (),
    ) -> None:
        self._seed = seed
        self._weights: dict[str, float] = {}
        self._tasks: dict[str, Tasks] = {}
        for entry in environments:
            if not entry.tasks:
                raise ValueError(f"environment {entry.env!r} has no tasks to train on")
            sampler = entry.sampler or Shuffled(entry.tasks, f"{seed}-{entry.env}")
            self._weights[entry.env] = entry.weight
            self._tasks[entry.env] = Tasks(entry.env, entry.tasks, sampler, f"{seed}-{entry.env}")
        self._drawn = {name: (drawn or {}).get(name, 0) for name in self._tasks}
        self._next_id = sum((drawn or {}).values())
        self._circuit = Circuit()
        self._lessons: list[Lesson] = []
        self._again: deque[tuple[Draw, Task]] = deque()
        self.gone: list[Draw] = []
        """Open draws whose environment or task is no longer there: they can only be dropped."""
        for draw in open_draws:
            tasks = self._tasks.get(draw.env)
            task = None if tasks is None else tasks.find(draw.task_key)
            if task is None:
                self.gone.append(draw)
            else:
                self._again.append((draw, task))

    def draw(self) -> tuple[Draw, Task]:
        draw, task = self._again.popleft() if self._again else self._new()
        self._circuit.drawn(draw.env, draw.id)
        return draw, task

    def hear(self, lesson: Lesson) -> None:
        """What became of a draw; it changes nothing until `learn`."""
        self._lessons.append(lesson)

    def learn(self) -> None:
        """From here on draws depend on everything that was heard, in that order."""
        for lesson in self._lessons:
            if lesson.env in self._tasks:
                self._learn(lesson)
        self._lessons.clear()

    def metrics(self) -> dict[str, float]:
        return {name: value for tasks in self._tasks.values() for name, value in tasks.metrics().items()}

    def _new(self) -> tuple[Draw, Task]:
        awake = [name for name in self._tasks if not self._circuit.rests(name, self._next_id)]
        names = awake or list(self._tasks)
        weights = [self._weights[name] for name in names]
        env = random.Random(f"{self._seed}-{self._next_id}").choices(names, weights)[0]
        task = self._tasks[env].draw(self._drawn[env])
        draw = Draw(self._next_id, env, task.key, self._drawn[env])
        self._drawn[env] += 1
        self._next_id += 1
        return draw, task

    def _learn(self, lesson: Lesson) -> None:
        env, circuit = lesson.env, self._circuit
        if lesson.rewards:
            self._tasks[env].observe(lesson.task_key, lesson.rewards)
            if circuit.worked(env, lesson.draw):
                log.warning("environment %r works again: it is drawn as often as before", env)
        elif not lesson.failed:
            circuit.given_up(env, lesson.draw)
        elif (rest := circuit.failed(env, lesson.draw, lesson.failed)) and lesson.story and len(self._tasks) > 1:
            log.warning(
                "environment %r only fails (%s): the next %d draws are of the others, then one tries it again",
                env, lesson.story, rest,
            )  # fmt: skip


def lesson_of(scored: ScoredGroup, step: int) -> Lesson:
    """What a finished training group says about the draws to come."""
    task = scored.group.task
    rewards = [reward for _, reward in scored.credited]
    lesson = Lesson(scored.group.draw_id, task.env, task.key, rewards, step=step, tokens=scored.credited_tokens)
    errors = [rollout.error for rollout, _ in scored.dropped if rollout.error is not None]
    if not scored.reason and len(errors) == scored.arrived and all(error.reason != GROUP_FAILED for error in errors):
        lesson.failed = scored.arrived
        lesson.story = f"{errors[-1].reason}: {errors[-1].detail}"
    return lesson
