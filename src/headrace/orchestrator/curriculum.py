"""Which task of an environment comes next: the samplers that ship, and the base of your own.

A sampler keeps no file. What it draws depends on the seed and on what it has observed, in order, and on nothing else:
the journal has both, so that a resumed run makes a sampler anew and lets it observe the whole past again. Left out on
purpose: tasks that are made up on the way, since the journal knows a task by its key alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import Failure
from headrace.rollout.types import Task


class CurriculumFailed(Failure):
    """A sampler raised, or drew what it does not have: the run ends. The message names the environment."""


class TaskSampler:
    """Base of all samplers: override `draw`, and `observe` where it learns.

    It is constructed with the environment's tasks and the `kwargs` of its section, at every start of the run.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def draw(self, position: int, rng: random.Random) -> Task:
        """The task of the environment's draw number `position`, which counts from 0.

        All chance comes from `rng`: it is made anew of the run's seed and the position for every draw.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draw")

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """A group of this task was credited, with these rewards of its trainable rollouts; there is at least one.

        Also when it was not trained on after that. Groups in which every episode failed are not observed.
        """

    def metrics(self) -> Mapping[str, float]:
        """Numbers to be logged with every step, as `curriculum/ENV/NAME`."""
        return {}

    @classmethod
    def learns(cls) -> bool:
        """Whether it has to be told about the past."""
        return cls.observe is not TaskSampler.observe


class Shuffled(TaskSampler):
    """Every task once before any comes again, in an order made anew for each pass. `seed` is any text."""

    def __init__(self, tasks: Sequence[Task], seed: str) -> None:
        super().__init__(tasks)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, position: int, rng: random.Random) -> Task:
        epoch, place = divmod(position, len(self.tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.tasks)))
            random.Random(f"{self._seed}-{epoch}").shuffle(self._order)
        return self.tasks[self._order[place]]


class InOrder(TaskSampler):
    """The tasks as they come, from the first to the last, and again: for an environment whose order is a curriculum."""

    def draw(self, position: int, rng: random.Random) -> Task:
        return self.tasks[position % len(self.tasks)]


class DifficultyPool(TaskSampler):
    """With replacement; how likely a task is depends on the mean reward of its latest group.

    Up to `hard_max` it is hard, up to `normal_max` normal, above that easy; before its first group it is unseen. Every
    task of a pool has the pool's weight. Where all that is left has weight 0, all of it is equally likely.
    """

    POOLS = ("unseen", "hard", "normal", "easy")

    def __init__(self, tasks: Sequence[Task], hard_max: float, normal_max: float, weights: Mapping[str, float]) -> None:
        super().__init__(tasks)
        self._bounds = hard_max, normal_max
        self._weights = [weights[name] for name in self.POOLS]
        self._pools: list[list[int]] = [list(range(len(tasks))), [], [], []]
        self._where = [(0, place) for place in range(len(tasks))]
        """By task, its pool and its place there."""
        self._numbers: dict[str, list[int]] = {}
        """By key; a task may be listed twice."""
        for number, task in enumerate(tasks):
            self._numbers.setdefault(task.key, []).append(number)

    def draw(self, position: int, rng: random.Random) -> Task:
        weights = [weight * len(pool) for weight, pool in zip(self._weights, self._pools, strict=True)]
        if not any(weights):
            weights = [len(pool) for pool in self._pools]
        (pool,) = rng.choices(self._pools, weights)
        return self.tasks[rng.choice(pool)]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        mean = sum(rewards) / len(rewards)
        pool = 1 + sum(mean > bound for bound in self._bounds)
        for number in self._numbers[task.key]:
            self._move(number, pool)

    def metrics(self) -> Mapping[str, float]:
        """The share of the tasks in each pool."""
        return {name: len(pool) / len(self.tasks) for name, pool in zip(self.POOLS, self._pools, strict=True)}

    def _move(self, number: int, pool: int) -> None:
        """The last of its old pool takes its place there: nothing is searched, however many tasks there are."""
        old, place = self._where[number]
        if old == pool:
            return
        last = self._pools[old].pop()
        if last != number:
            self._pools[old][place] = last
            self._where[last] = old, place
        self._where[number] = pool, len(self._pools[pool])
        self._pools[pool].append(number)


class Tasks:
    """One environment's tasks and their sampler, with what is asked of a sampler checked: it may be a user's."""

    def __init__(self, env: str, tasks: Sequence[Task], sampler: TaskSampler, seed: str) -> None:
        self._env = env
        self._seed = seed
        self._by_key = {task.key: task for task in tasks}
        self._sampler = sampler

    def find(self, key: str) -> Task | None:
        return self._by_key.get(key)

    def draw(self, position: int) -> Task:
        drawn: Any = self._call("draw", position, random.Random(f"{self._seed}-{position}"))
        if not isinstance(drawn, Task) or drawn.key not in self._by_key:
            raise CurriculumFailed(
                f"{self._name}.draw gave {_shortened(drawn)}, which is none of the environment's tasks: give an entry "
                "of self.tasks"
            )
        return self._by_key[drawn.key]

    def observe(self, key: str, rewards: Sequence[float]) -> None:
        """Tasks that the environment no longer has are left out."""
        task = self._by_key.get(key)
        if task is not None and rewards and self._sampler.learns():
            self._call("observe", task, rewards)

    def metrics(self) -> dict[str, float]:
        values: Mapping[str, float] = self._call("metrics")
        return {f"curriculum/{self._env}/{name}": float(value) for name, value in values.items()}

    @property
    def _name(self) -> str:
        return f"environment {self._env!r}: {type(self._sampler).__name__}"

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._sampler, method)(*arguments)
        except Exception as error:
            raise CurriculumFailed(f"{self._name}.{method} failed: {type(error).__name__}: {error}") from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
