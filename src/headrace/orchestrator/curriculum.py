"""Task samplers: which task of an environment is drawn next, and the base class for custom samplers.

A sampler keeps no file. Its draws depend only on the seed and on what it has observed, in order. The journal records
both, so a resumed run constructs a new sampler and replays the observations. Left out on purpose: tasks that are
generated during the run, since the journal identifies a task by its key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.environments import SAMPLERS, SamplerConfig
from headrace.errors import Failure, InvalidValue
from headrace.imports import load_class
from headrace.rollout.types import Task


class CurriculumFailed(Failure):
    """A sampler raised an error or drew something that is not one of its tasks. Ends the run."""


class TaskSampler:
    """Base class of all samplers: override `draw`, and `observe` if the sampler adapts to rewards.

    Constructed with the environment's tasks and the `kwargs` of its section, at every start of the run.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def draw(self, position: int, rng: random.Random) -> Task:
        """Return the task of the environment's draw number `position`, counted from 0.

        Take all randomness from `rng`, which is seeded with the run's seed and the position.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draw")

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Receive the rewards of the trainable rollouts (at least one) of a credited group of this task.

        Also called for groups that are dropped after their credit; not for groups in which every episode failed.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return numbers to log with every step, as `curriculum/ENV/NAME`."""
        return {}

    @classmethod
    def learns(cls) -> bool:
        """Return whether the class overrides `observe`."""
        return cls.observe is not TaskSampler.observe


@SAMPLERS.register
class ShuffledConfig(SamplerConfig):
    """Random order without replacement: each task once per pass over all tasks."""

    type: Literal["shuffled"] = "shuffled"

    def make(self, tasks: Sequence[Task]) -> None:
        return None


class Shuffled(TaskSampler):
    """Draws every task once per pass, in a new random order for each pass. `seed` is any string."""

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


@SAMPLERS.register
class InOrderConfig(SamplerConfig):
    """In the order of the environment, repeated after the last task."""

    type: Literal["in_order"] = "in_order"

    def make(self, tasks: Sequence[Task]) -> InOrder:
        return InOrder(tasks)


class InOrder(TaskSampler):
    """Draws the tasks in their order, repeatedly: for environments whose order is a curriculum."""

    def draw(self, position: int, rng: random.Random) -> Task:
        return self.tasks[position % len(self.tasks)]


class PoolWeightsConfig(Config):
    """Relative probability of drawing a task, by its pool."""

    unseen: float = Field(1.0, ge=0)
    """Weight of tasks that have not been drawn yet."""
    hard: float = Field(0.2, ge=0)
    """Weight of hard tasks."""
    normal: float = Field(1.0, ge=0)
    """Weight of normal tasks."""
    easy: float = Field(0.2, ge=0)
    """Weight of easy tasks."""


@SAMPLERS.register
class DifficultyPoolConfig(SamplerConfig):
    """Tasks by the mean reward of their latest group, drawn with replacement, with a weight for each pool."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    hard_max: float = 0.25
    """Mean reward up to which a task is hard."""
    normal_max: float = 0.75
    """Mean reward up to which a task is normal; above it, a task is easy."""
    weights: PoolWeightsConfig = Field(default_factory=PoolWeightsConfig)

    def make(self, tasks: Sequence[Task]) -> DifficultyPool:
        return DifficultyPool(tasks, self.hard_max, self.normal_max, self.weights.model_dump())

    def problems(self) -> Iterator[InvalidValue]:
        if self.hard_max >= self.normal_max:
            fact = f"not below normal_max, which is {self.normal_max:g}: no task would be normal"
            yield self.invalid("hard_max", fact, "Lower hard_max, or raise normal_max.")
        if not any(self.weights.model_dump().values()):
            yield InvalidValue("every weight is 0", key="weights", fix="Set the weight of at least one pool above 0.")


class DifficultyPool(TaskSampler):
    """Draws with replacement, weighted by the mean reward of a task's latest group.

    A task is hard up to `hard_max`, normal up to `normal_max`, easy above, and unseen before its first group. Every
    task of a pool has the pool's weight. If all non-empty pools have weight 0, all tasks are equally likely.
    """

    POOLS = ("unseen", "hard", "normal", "easy")

    def __init__(self, tasks: Sequence[Task], hard_max: float, normal_max: float, weights: Mapping[str, float]) -> None:
        super().__init__(tasks)
        self._bounds = hard_max, normal_max
        self._weights = [weights[name] for name in self.POOLS]
        self._pools: list[list[int]] = [list(range(len(tasks))), [], [], []]
        self._where = [(0, place) for place in range(len(tasks))]
        """Pool and position in it, by task index."""
        self._numbers: dict[str, list[int]] = {}
        """Task indices by key: a task may be listed twice."""
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
        """Return the fraction of the tasks in each pool."""
        return {name: len(pool) / len(self.tasks) for name, pool in zip(self.POOLS, self._pools, strict=True)}

    def _move(self, number: int, pool: int) -> None:
        """Move a task to another pool in O(1): the last task of its old pool takes its position there."""
        old, place = self._where[number]
        if old == pool:
            return
        last = self._pools[old].pop()
        if last != number:
            self._pools[old][place] = last
            self._where[last] = old, place
        self._where[number] = pool, len(self._pools[pool])
        self._pools[pool].append(number)


@SAMPLERS.register
class ImportedSamplerConfig(SamplerConfig):
    """A sampler of your own: a subclass of `headrace.orchestrator.curriculum.TaskSampler`."""

    type: str
    """`package.module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor, besides the tasks."""

    def make(self, tasks: Sequence[Task]) -> TaskSampler:
        return self._load()(tasks, **self.kwargs)

    def check_imports(self) -> None:
        self._load()

    def _load(self) -> Callable[..., TaskSampler]:
        return load_class(self.type, TaskSampler, ([],), self.kwargs, "sampler.type")


class CheckedSampler:
    """An environment's sampler, which may be user code: checks its draws and names it in errors."""

    def __init__(self, env: str, tasks: Sequence[Task], sampler: TaskSampler, seed: str) -> None:
        self._env, self._sampler, self._seed = env, sampler, seed
        self._by_key = {task.key: task for task in tasks}
        self.observed = 0
        """Number of calls of `observe`."""

    def find(self, key: str) -> Task | None:
        return self._by_key.get(key)

    def draw(self, position: int) -> Task:
        drawn: Any = self._call("draw", position, random.Random(f"{self._seed}-{position}"))
        if not isinstance(drawn, Task) or drawn.key not in self._by_key:
            raise CurriculumFailed(
                f"{self._name}.draw returned {drawn!r:.80}, which is not one of the environment's "
                "tasks. Return an entry of self.tasks."
            )
        return self._by_key[drawn.key]

    def observe(self, key: str, rewards: Sequence[float]) -> None:
        """Pass a group's rewards to the sampler, unless the environment no longer has the task."""
        task = self._by_key.get(key)
        if task is not None and rewards and self._sampler.learns():
            self._call("observe", task, rewards)
            self.observed += 1

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
