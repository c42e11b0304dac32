"""When to evaluate and what came of it. Evaluation shares permits with training; nothing waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.errors import BadInput
from headrace.observe.metrics import spread
from headrace.orchestrator.signals import EvalBatch, ScoredGroup
from headrace.rollout.types import Group, Rollout, Task
from headrace.rollout.version import Version

CORRECT = "correct"
"""The reward or metric that says whether an episode is right, where an environment has one."""


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
                raise BadInput(f"evaluation environment {env.name!r} has no tasks")
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
        self._pinned: list[EvalBatch] = []

    @property
    def pins_version(self) -> bool:
        """Whether an open epoch must be sampled from the current weights to its end."""
        return bool(self._pinned)

    def open(self, env: EvalEnv, version: Version, groups: Sequence[Group]) -> None:
        batch = EvalBatch(env.name, version, env.group_size)
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


def epoch_metrics(batch: EvalBatch) -> dict[str, float]:
    """avg@k over all episodes, pass@k over tasks (any right episode). A failed episode counts as 0 in both.

    An episode is right if its `correct`, a reward or metric, is 1, or its whole reward where it has no such.
    So an evaluation that times out on what is hard does not look better for it; `errors` says how many failed. What an
    episode with several agents comes to is the mean over those that are trained; each of these has an avg@k of its own,
    over what it finished: an agent may play more than once in an episode, or not at all.
    """
    finished = [rollout for group in batch.groups for rollout in group.rollouts]
    scores = [[_mean(rewards) for rewards in _episodes(group, _reward)] for group in batch.groups]
    passes = [[_mean(passed) for passed in _episodes(group, _correctness)] for group in batch.groups]
    episodes = sum(map(len, scores))
    k = batch.group_size
    values = {
        f"avg@{k}": sum(map(sum, scores)) / episodes,
        f"pass@{k}": sum(any(score >= 1.0 for score in group) for group in passes) / len(passes),
        "errors": _failed(batch) / episodes,
    }
    agents = sorted({rollout.agent for rollout in finished if rollout.trainable})
    for agent in agents if len(agents) > 1 else ():
        values[f"{agent}/avg@{k}"] = _mean([r.reward for r in finished if r.agent == agent and r.trainable])
    if finished:
        values |= {
            "truncated": sum(rollout.truncated for rollout in finished) / len(finished),
            **spread("decode_len", (rollout.completion_tokens for rollout in finished)),
        }
        oldest = [version for rollout in finished if (version := rollout.oldest_version) is not None]
        newest = [version for rollout in finished if (version := rollout.newest_version) is not None]
        if oldest and newest:  # what a script plays has no sampled token
            values |= {"version/min": min(oldest), "version/max": max(newest)}
        for name in {name for rollout in finished for name in rollout.metrics}:
            known = [rollout.metrics[name] for rollout in finished if name in rollout.metrics]
            values[f"metrics/{name}"] = sum(known) / len(known)
    return {f"eval/{batch.env}/{name}": value for name, value in values.items()}


def _reward(rollout: Rollout) -> float:
    return rollout.reward


def _correctness(rollout: Rollout) -> float:
    return (rollout.rewards | rollout.metrics).get(CORRECT, rollout.reward)


def _episodes(group: ScoredGroup, value: Callable[[Rollout], float]) -> list[list[float]]:
    """By episode, the values that count: of the agents that are trained, if any is; 0 for what failed."""
    by_episode: dict[int, list[Rollout]] = {}
    for rollout in [*group.rollouts, *(rollout for rollout, _ in group.dropped)]:
        by_episode.setdefault(rollout.episode, []).append(rollout)
    return [
        [0.0 if r.error is not None else value(r) for r in [r for r in rollouts if r.trainable] or rollouts]
        for rollouts in by_episode.values()
    ]


def _failed(batch: EvalBatch) -> int:
    """Episodes in which anything did."""
    return sum(len({rollout.episode for rollout, _ in group.dropped}) for group in batch.groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
