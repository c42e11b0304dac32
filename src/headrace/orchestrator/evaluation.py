"""Schedule of evaluations, and the tracking of open ones. Evaluation shares the slots in flight with training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import BadInput
from headrace.orchestrator.signals import EvalBatch, ScoredGroup
from headrace.rollout.types import Group, Task
from headrace.rollout.version import Version


class EvalEnv(msgspec.Struct):
    """An evaluation environment: tasks, interval in steps, and episodes per task."""

    name: str
    tasks: Sequence[Task]
    interval: int
    group_size: int
    pinned: bool = False
    """Whether loading new weights waits until its evaluation is complete."""
    together: bool = False
    """Whether the episodes of a group start at the same time, because the environment scores whole groups."""
    solved: float | None = None
    """Reward threshold of a solved episode; None: 1, if rewards are binary."""


NEVER = Version(0, -1)


class EvalSource:
    """Decides at which versions each environment is evaluated, and creates the groups of an evaluation."""

    def __init__(
        self, environments: Sequence[EvalEnv], evaluated: Mapping[str, Version], *, again_on_resume: bool = False
    ) -> None:
        """`evaluated` is the last version, by environment, that needs no evaluation; without one, version 0 is due.

        `again_on_resume`: whether an evaluated version is evaluated again when the trainer resumes from it.
        """
        for env in environments:
            if not env.tasks:
                raise BadInput("this evaluation environment has no tasks", key="orchestrator.eval.env", value=env.name)
        self._environments = environments
        self._evaluated = {env.name: evaluated.get(env.name, NEVER) for env in environments}
        self._again_on_resume = again_on_resume
        self._ids = itertools.count()

    def discard_newer(self, version: Version) -> None:
        """Discard evaluations after `version` if it belongs to a new incarnation, which publishes those steps again."""
        kept = version.step
        if self._again_on_resume and kept:  # `eval_base_model` decides about version 0
            kept -= 1
        for name, done in self._evaluated.items():
            if version.incarnation > done.incarnation:
                self._evaluated[name] = Version(version.incarnation, min(done.step, kept))

    def due(self, version: Version, *, final: bool = False) -> list[EvalEnv]:
        """Return the environments that passed a multiple of their interval since their last evaluation.

        With `final`, return those on which this version has not been evaluated.
        """
        intervals = [(env, 1 if final else env.interval) for env in self._environments]
        return [env for env, every in intervals if version.step // every > self._evaluated[env.name].step // every]

    def open(self, env: EvalEnv, version: Version) -> list[Group]:
        """Return the groups of one evaluation of an environment."""
        self._evaluated[env.name] = version
        return [
            Group(f"eval-{env.name}-{next(self._ids)}", task, env.group_size, version.step, together=env.together)
            for task in env.tasks
        ]


class EvalTracker:
    """Collects the groups of open evaluations. Evaluations of one environment may overlap."""

    def __init__(self) -> None:
        self._batch_of: dict[str, EvalBatch] = {}
        """Evaluations by the id of each of their groups that is not complete."""
        self.open_evals = 0
        """Evaluations that are not reported."""
        self._opened = 0
        """Groups of all evaluations since the last moment without an open one."""
        self.pinned_evals = 0
        """Evaluations that are not complete and must be sampled from the current weights to their end."""

    @property
    def tasks(self) -> tuple[int, int]:
        """Return how many tasks of the open evaluations are done, and how many there are."""
        return self._opened - len(self._batch_of), self._opened

    def open(self, env: EvalEnv, version: Version, groups: Sequence[Group], now: float = 0.0) -> None:
        self._opened = len(groups) + (self._opened if self.open_evals else 0)
        batch = EvalBatch(env.name, version, env.group_size, env.solved, now, env.pinned, len(groups))
        self._batch_of.update({group.id: batch for group in groups})
        self.open_evals += 1
        self.pinned_evals += env.pinned

    def add(self, scored: ScoredGroup) -> EvalBatch | None:
        """Add a complete group; return the batch of its evaluation if this was the last group."""
        batch = self._batch_of.pop(scored.group.id)
        batch.groups.append(scored)
        batch.missing -= 1
        if batch.missing:
            return None
        self.pinned_evals -= batch.pinned
        return batch

    def record_reported(self) -> None:
        self.open_evals -= 1
