"""When to evaluate and what came of it. Evaluation shares permits with training; nothing waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from headrace.observe.metrics import spread
from headrace.rollout.types import Group, Rollout, Task


class EvalEnv(msgspec.Struct):
    """One evaluation environment: its tasks, how often, and how many episodes each."""

    name: str
    tasks: Sequence[Task]
    interval: int
    group_size: int


class EvalSource:
    """Decides at which versions each environment is evaluated, and makes the groups of one epoch."""

    def __init__(self, environments: Sequence[EvalEnv], evaluated: Mapping[str, int]) -> None:
        """`evaluated`: by environment, the last version that was evaluated or shall not be; none: version 0 is due."""
        self._environments = environments
        self._evaluated = {env.name: evaluated.get(env.name, -1) for env in environments}
        self._ids = itertools.count()

    def due(self, version: int) -> list[EvalEnv]:
        """Environments for which a multiple of the interval has been reached since they were last evaluated."""
        return [
            env for env in self._environments if version // env.interval > self._evaluated[env.name] // env.interval
        ]

    def overdue_at_end(self, version: int) -> list[EvalEnv]:
        """Environments that the final version has not been evaluated on."""
        return [env for env in self._environments if self._evaluated[env.name] < version]

    def open(self, env: EvalEnv, version: int) -> list[Group]:
        """The groups of one epoch over an environment."""
        self._evaluated[env.name] = version
        return [Group(f"eval-{env.name}-{next(self._ids)}", task, env.group_size, version) for task in env.tasks]


class EvalResult(msgspec.Struct):
    """One finished evaluation. `metrics` are named `eval/ENV/...`."""

    env: str
    version: int
    metrics: dict[str, float]


class _Epoch(msgspec.Struct):
    env: EvalEnv
    version: int
    missing: int
    """Groups that are not complete."""
    groups: dict[str, list[Rollout]] = msgspec.field(default_factory=dict)


class EvalSink:
    """Counts arrivals; the last one of an epoch yields its result. Epochs of one environment may overlap."""

    def __init__(self) -> None:
        self._epoch_of: dict[str, _Epoch] = {}

    def open(self, env: EvalEnv, version: int, groups: Sequence[Group]) -> None:
        epoch = _Epoch(env, version, len(groups))
        self._epoch_of.update({group.id: epoch for group in groups})

    def add(self, group: Group, rollouts: Sequence[Rollout], group_complete: bool) -> EvalResult | None:
        epoch = self._epoch_of[group.id]
        epoch.groups.setdefault(group.id, []).extend(rollouts)
        if not group_complete:
            return None
        del self._epoch_of[group.id]
        epoch.missing -= 1
        return _result(epoch) if epoch.missing == 0 else None


def _result(epoch: _Epoch) -> EvalResult:
    """avg@k over all episodes, pass@k over tasks (any episode with reward 1); failed episodes count only as errors."""
    groups = [[r for r in rollouts if r.error is None] for rollouts in epoch.groups.values()]
    finished = [rollout for rollouts in groups for rollout in rollouts]
    arrived = sum(len(rollouts) for rollouts in epoch.groups.values())
    k, values = epoch.env.group_size, {"errors": (arrived - len(finished)) / arrived}
    if finished:
        versions = [version for rollout in finished for turn in rollout.turns for version in turn.versions]
        values |= {
            f"avg@{k}": sum(rollout.reward for rollout in finished) / len(finished),
            f"pass@{k}": sum(any(r.reward >= 1.0 for r in rollouts) for rollouts in groups) / len(groups),
            "truncated": sum(rollout.truncated for rollout in finished) / len(finished),
            "version/min": min(versions),
            "version/max": max(versions),
            **spread("decode_len", (rollout.completion_tokens for rollout in finished)),
        }
        for name in {name for rollout in finished for name in rollout.metrics}:
            known = [rollout.metrics[name] for rollout in finished if name in rollout.metrics]
            values[f"metrics/{name}"] = sum(known) / len(known)
    return EvalResult(epoch.env.name, epoch.version, {f"eval/{epoch.env.name}/{n}": v for n, v in values.items()})
