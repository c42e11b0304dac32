"""A run's saved rollouts, credited over again by other algorithms: what `headrace rescore` does, step by step.

Each environment has an algorithm of its own, as in a run. Tasks come from the environment as the run file has it, and
only for an algorithm that may look at them; tokenizer and renderer are read when they are asked for. The policy of that
time is gone, so an algorithm that asks it is refused. One whose state follows from agents and rewards finds, for each
group, the state that the journal's credits before it come to; one with another state begins without any, and sees the
groups of a step in the order in which they were drawn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from types import MappingProxyType
from typing import cast

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.algorithms.base import Algorithm, Host, MakeContext
from headrace.algorithms.length_penalty import LengthPenaltyConfig
from headrace.algorithms.penalized import Penalized
from headrace.algorithms.recalled import Recalled
from headrace.config.algorithms import AlgorithmConfig
from headrace.config.orchestrator import OrchestratorConfig, TrainEnvConfig
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.errors import BadInput
from headrace.orchestrator.audit import states_before
from headrace.orchestrator.crediting import frozen_model
from headrace.rollout.merge import observed_roles
from headrace.rollout.types import Task
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.tools.rescore.credit import Member, Rescored, rescore
from headrace.tools.rescore.credit_comparison import Collector, Comparison
from headrace.tools.rescore.credited_groups import CreditedGroups
from headrace.transport.journal import Journal
from headrace.transport.rollout_files import RolloutFiles, SavedRollout

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""What is being done, how many steps of it are, and how many there are in all."""


class Outcome(msgspec.Struct):
    comparison: Comparison
    advantages: np.ndarray
    """A row per rollout: its mean advantage then and now, NaN where it has none."""
    left_out: dict[str, int]
    """Saved rollouts that no algorithm has credited, or whose group is not all there, by reason."""
    not_trained: dict[str, int]
    """Rollouts that the algorithm itself would not train on, by what it says."""
    counted: dict[str, float]
    """What the algorithms counted, as `ENV/NAME`."""


class GonePolicy:
    """Stands where a run has its policy."""

    name = "the policy"

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        raise BadInput(
            "the algorithm asks the policy, and the policy of that time is gone",
            key="--algo",
            fix="Give it a frozen model.",
        )

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        raise BadInput(
            "the algorithm asks the policy, and the policy of that time is gone",
            key="--algo",
            fix="Give it a frozen model.",
        )

    async def close(self) -> None:
        """There is nothing."""


async def rescore_run(
    config: OrchestratorConfig,
    files: RolloutFiles,
    steps: Sequence[int],
    env: str | None,
    progress: Progress,
    penalties: Mapping[str, LengthPenaltyConfig] = MappingProxyType({}),
    journal: Journal | None = None,
) -> Outcome:
    """Credit what was saved in these steps as `config` says, and compare it with the credit that it has.

    `penalties` come on top, for the algorithms of these environments, which take none of their own. The `journal` is
    where states come from, if there is one.
    """
    async with AsyncExitStack() as stack:
        entries = [entry for entry in config.train.env if env in (None, entry.name)]
        desks = {e.name: await _desk(config, e, penalties.get(e.name), journal, stack) for e in entries}
        groups = CreditedGroups(files, steps, env, partial(progress, "looking for groups"))
        collector, not_trained = Collector(), Counter[str]()
        for number, step in enumerate(steps):
            progress("crediting steps", number, len(steps))
            rescored = await _rescore_step(groups.of_step(step), desks, config)
            collector.add_step(rescored)
            not_trained.update(entry.drop for entry in rescored if entry.drop)
        counted = {
            f"{name}/{key}": value for name, desk in desks.items() for key, value in desk.algorithm.tally.take().items()
        }
    return Outcome(collector.comparison(), collector.advantages, dict(groups.left_out), dict(not_trained), counted)


class _Desk(msgspec.Struct):
    """An environment's algorithm, and what it looks at beside rollouts."""

    env: str
    algorithm: Algorithm
    tasks: dict[str, Task] | None
    """By key; None: it looks at none."""
    reads_roles: bool
    """Whether it must know who wrote what was observed."""

    def member(self, saved: SavedRollout, excluded: bool) -> Member:
        rollout = saved.rollout
        if self.reads_roles and any(observed_roles(sample, rollout.turns) is None for sample in rollout.samples):
            raise BadInput(
                f"echo must know who wrote what the policy observed, and the rollouts of {self.env!r} do not say: the "
                "run's renderer could not, or an older version of Headrace saved them",
                key="--algo",
                value="echo",
            )
        return Member(rollout, self._task(rollout.task_key), not saved.drop_reason, excluded)

    def _task(self, key: str) -> Task:
        if self.tasks is None:
            return Task(self.env, {}, key)
        if key not in self.tasks:
            raise BadInput(
                f"environment {self.env!r} no longer has this task, which the run had",
                key="task",
                value=key,
                fix="Use the data and the args that the run had.",
            )
        return self.tasks[key]


async def _rescore_step(
    groups: Sequence[Sequence[SavedRollout]], desks: dict[str, _Desk], config: OrchestratorConfig
) -> list[Rescored]:
    enforced = [entry for entry in (*config.pre_batch_filters, *config.post_batch_filters) if entry.enforce]
    by_content = {entry.label for entry in enforced if not entry.READS_ADVANTAGES}
    by_credit = any(entry.READS_ADVANTAGES for entry in enforced)
    by_env: dict[str, list[list[Member]]] = {}
    for group in groups:
        desk = desks[group[0].rollout.env]
        members = [desk.member(saved, saved.drop_reason in by_content) for saved in group]
        by_env.setdefault(desk.env, []).append(members)
    return [
        rescored
        for env, chosen in by_env.items()
        for rescored in await rescore(chosen, desks[env].algorithm, drop_without_advantage=by_credit)
    ]


async def _desk(
    config: OrchestratorConfig,
    entry: TrainEnvConfig,
    penalty: LengthPenaltyConfig | None,
    journal: Journal | None,
    stack: AsyncExitStack,
) -> _Desk:
    """The algorithm, set up; closed with the stack."""
    assert config.seq_len is not None
    algo = config.algo_of(entry)
    algorithm: Algorithm = algo.make(MakeContext(config.seq_len, frozen_model))
    algorithm.host = cast(Host, _Host(config, entry))
    await algorithm.setup()
    stack.push_async_callback(algorithm.close)
    if algorithm.replayable and journal is not None:
        states = await states_before(journal, entry.name, algorithm)
        algorithm.tally.take()  # the replay is not to be counted
        algorithm = Recalled(algorithm, states)
    if penalty is not None:
        algorithm = Penalized(algorithm, penalty.make(config.seq_len))
    tasks = _tasks(entry, algo) if algo.reads_tasks else None
    return _Desk(entry.name, algorithm, tasks, algo.NEEDS_ROLES)


def _tasks(entry: TrainEnvConfig, algo: AlgorithmConfig) -> dict[str, Task]:
    try:
        return {task.key: task for task in tasks_of(load_environment(entry.id, entry.args), entry.name)}
    except Exception as error:  # an environment is a user's code, and may need what was there when the run ran
        raise BadInput(
            f"{algo.type} may look at the tasks, and the environment cannot be loaded as the run had it: {error}",
            key="env",
            value=entry.name,
        ) from error


class _Host:
    """A `Host` that reads the model's files only if they are asked for: most algorithms never do."""

    def __init__(self, config: OrchestratorConfig, entry: TrainEnvConfig) -> None:
        assert config.model.name is not None
        self.env = entry.name
        self.policy = GonePolicy()
        self.seq_len = config.seq_len
        self.seed = config.seed
        self.temperature = config.train_temperature(entry)
        self.notify = log.warning
        self._model = config.model.name
        self._renderer = config.renderer.model_dump(exclude={"pool_size"})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(model_directory(self._model))

    @cached_property
    def renderer(self) -> Renderer:
        return make_renderer(model_directory(self._model), self.tokenizer, **self._renderer)
