"""Where training prompts come from: an endless weighted draw over the environments, the same for the same seed.

Draw i picks an environment from (seed, i); an environment's p-th draw is the p-th task of a permutation made anew for
each pass over its tasks. So the state is a count per environment, and a resumed run draws what an uninterrupted one
would have drawn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from headrace.orchestrator.journal import Draw
from headrace.rollout.types import Task


class TrainTasks(msgspec.Struct):
    """One training environment as the source sees it."""

    env: str
    tasks: Sequence[Task]
    weight: float


class TrainSource:
    """`open_draws` are prompts that an earlier process drew and did not finish: they come first, with their ids."""

    def __init__(
        self,
        environments: Iterable[TrainTasks],
        seed: int,
        drawn: dict[str, int] | None = None,
        open_draws: Iterable[Draw] = (),
    ) -> None:
        self._environments = {entry.env: entry for entry in environments}
        for entry in self._environments.values():
            if not entry.tasks:
                raise ValueError(f"environment {entry.env!r} has no tasks to train on")
        self._seed = seed
        self._drawn = {name: (drawn or {}).get(name, 0) for name in self._environments}
        self._next_id = sum((drawn or {}).values())
        self._orders: dict[tuple[str, int], list[int]] = {}
        self._again: deque[Draw] = deque()
        self.gone: list[Draw] = []
        """Open draws whose environment or task is no longer what it was: they can only be dropped."""
        for draw in open_draws:
            there = draw.env in self._environments and self._task(draw.env, draw.position).key == draw.task_key
            (self._again if there else self.gone).append(draw)

    def draw(self) -> tuple[Draw, Task]:
        if self._again:
            draw = self._again.popleft()
            return draw, self._task(draw.env, draw.position)
        names = list(self._environments)
        weights = [self._environments[name].weight for name in names]
        env = random.Random(f"{self._seed}-{self._next_id}").choices(names, weights)[0]
        task = self._task(env, self._drawn[env])
        draw = Draw(self._next_id, env, task.key, self._drawn[env])
        self._drawn[env] += 1
        self._next_id += 1
        return draw, task

    def _task(self, env: str, position: int) -> Task:
        tasks = self._environments[env].tasks
        epoch, place = divmod(position, len(tasks))
        order = self._orders.get((env, epoch))
        if order is None:
            order = list(range(len(tasks)))
            random.Random(f"{self._seed}-{env}-{epoch}").shuffle(order)
            self._orders = {key: kept for key, kept in self._orders.items() if key[0] != env or key[1] >= epoch - 1}
            self._orders[env, epoch] = order
        return tasks[order[place]]
