"""When to evaluate, and when an evaluation is complete. It shares permits with training; nothing waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import BadInput
from headrace.orchestrator.signals import EvalBatch, ScoredGroup
from headrace.rollout.types import Group, Task
from headrace.rollout.version import Version


class EvalEnv(msgspec.Struct):
    """One evaluation environment: its tasks, how often, and how many episodes each."""

    name: str
    tasks: Sequence[Task]
    interval: int
    group_size: int
    pinned: bool = False
    """Whether new weights wait until its epoch has closed."""
    together: bool = False
    """Whether a group's episodes start at once: the environment scores them against each other."""
    solved: float | None = None
    """The reward from which on an episode is solved; None: 1, where rewards are 0 or 1."""


NEVER = Version(0, -1)


class EvalSource:
    """Decides at which versions each environment is evaluated, and makes the groups of one epoch."""

    def __init__(
        self, environments: Sequence[EvalEnv], evaluated: Mapping[str, Version], *, again_on_resume: bool = False
    ) -> None:
        """`evaluated`: by environment, the last version that was evaluated or shall not be; none: version 0 is due.

        `again_on_resume`: whether a version that was evaluated is so again when the trainer goes on from it.
        """
        for env in environments:
            if not env.tasks:
                raise BadInput("this evaluation environment has no tasks", key="orchestrator.eval.env", value=env.name)
        self._environments = environments
        self._evaluated = {env.name: evaluated.get(env.name, NEVER) for env in environments}
        self._again_on_resume = again_on_resume
        self._ids = itertools.count()

    def follow(self, version: Version) -> None:
        """The engines sample from `version`. If it begins a lineage, what others had evaluated after it is lost."""
        kept = version.step
        if self._again_on_resume and kept:  # of version 0 another key decides
            kept -= 1
        for name, done in self._evaluated.items():
            if version.incarnation > done.incarnation:
                self._evaluated[name] = Version(version.incarnation, min(done.step, kept))

    def due(self, version: Version) -> list[EvalEnv]:
        """Environments for which a multiple of the interval has been reached since they were last evaluated."""
        return [
            env
            for env in self._environments
            if version.step // env.interval > self._evaluated[env.name].step // env.interval
        ]

    def overdue_at_end(self, version: Version) -> list[EvalEnv]:
        """Environments that the final version has not been evaluated on."""
        return [env for env in self._environments if self._evaluated[env.name].step < version.step]

    def open(self, env: EvalEnv, version: Version) -> list[Group]:
        """The groups of one epoch over an environment."""
        self._evaluated[env.name] = version
        return [
            Group(f"eval-{env.name}-{next(self._ids)}", task, env.group_size, version.step, together=env.together)
            for task in env.tasks
        ]


class _Epoch(msgspec.Struct):
    batch: EvalBatch
    missing: int
    """Groups that are not complete."""
    pinned: bool


class EvalSink:
    """Counts groups; the last one of an epoch completes its batch. Epochs of one environment may overlap."""

    def __init__(self) -> None:
        self._epoch_of: dict[str, _Epoch] = {}
        self.open_epochs = 0
        """Epochs that have been opened and not reported."""
        self._opened = 0
        """Groups of all epochs since one was opened while no other was."""
        self._pinned: list[EvalBatch] = []

    @property
    def pins_version(self) -> bool:
        """Whether an open epoch must be sampled from the current weights to its end."""
        return bool(self._pinned)

    @property
    def tasks(self) -> tuple[int, int]:
        """How many tasks of the evaluations under way are done, and how many there are."""
        return self._opened - len(self._epoch_of), self._opened

    def open(self, env: EvalEnv, version: Version, groups: Sequence[Group], now: float = 0.0) -> None:
        self._opened = len(groups) + (self._opened if self.open_epochs else 0)
        batch = EvalBatch(env.name, version, env.group_size, env.solved, now)
        epoch = _Epoch(batch, len(groups), env.pinned)
        self._epoch_of.update({group.id: epoch for group in groups})
        self.open_epochs += 1
        if env.pinned:
            self._pinned.append(batch)

    def add(self, scored: ScoredGroup) -> EvalBatch | None:
        """A group is complete; its epoch's batch if it was the last of it."""
        epoch = self._epoch_of.pop(scored.group.id)
        epoch.batch.groups.append(scored)
        epoch.missing -= 1
        if epoch.missing:
            return None
        if epoch.pinned:
            self._pinned.remove(epoch.batch)
        return epoch.batch

    def close(self) -> None:
        """The numbers of one are out."""
        self.open_epochs -= 1
