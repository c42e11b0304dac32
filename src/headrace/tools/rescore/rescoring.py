"""Rescores the saved rollouts of a run, step by step, with the algorithm of each environment.

Tasks are loaded only for an algorithm that may read them; tokenizer and renderer when they are used. The policy of the
run is gone, so an algorithm that requests its logprobs is refused. An algorithm whose state follows from agents and
rewards gets, for each group, the state that the journal's credits before it lead to; one with another state starts
without, and sees the groups of a step in the order in which they were drawn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.algorithms.base import Algorithm, Host, MakeContext
from headrace.algorithms.kl import make_algorithm
from headrace.algorithms.length_penalties import LengthPenalty, LengthPenaltyConfig
from headrace.config.orchestrator import OrchestratorConfig, TrainEnvConfig
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.errors import BadInput
from headrace.inference.client.reference import Generated
from headrace.orchestrator.audit import replay_states
from headrace.orchestrator.crediting import make_frozen_model
from headrace.rollout.merge import observed_roles
from headrace.rollout.types import Task
from headrace.text.hub import model_directory
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.tools.common import ReportProgress
from headrace.tools.rescore.comparison import Collector, Comparison
from headrace.tools.rescore.credit import CreditedGroups, Member, Rescored, rescore
from headrace.transport.journal import Journal
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.rollout_tables import SavedRollout

log = logging.getLogger(__name__)


class RescoreResult(msgspec.Struct):
    """The new credit of a run's rollouts beside the saved one."""

    comparison: Comparison
    advantages: np.ndarray
    """A row per rollout: its mean advantage then and now, NaN without advantages."""
    left_out: dict[str, int]
    """By reason: saved rollouts without credit, or whose group is incomplete."""
    not_trained: dict[str, int]
    """By the algorithm's reason: rollouts that it would not train on."""
    counted: dict[str, float]
    """The tallies of the algorithms, as `ENV/NAME`."""
    changed_groups: dict[str, float]
    """Groups whose credit differs beyond rounding, with the largest difference."""


class MissingPolicy:
    """A `Reference` in place of the policy, which raises an error when it is used."""

    name = "the policy"

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        self._refuse()

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        self._refuse()

    async def generate(self, *args: Any, **options: Any) -> Generated:
        self._refuse()

    async def close(self) -> None:
        """There is nothing to close."""

    def _refuse(self) -> NoReturn:
        fact = "the algorithm asks the policy, and the policy of that time is gone"
        raise BadInput(fact, key="--algo", fix="Give it a frozen model.")


async def rescore_run(
    config: OrchestratorConfig,
    files: RolloutFiles,
    steps: Sequence[int],
    env: str | None,
    progress: ReportProgress,
    penalties: Mapping[str, LengthPenaltyConfig] = MappingProxyType({}),
    journal: Journal | None = None,
) -> RescoreResult:
    """Credit the rollouts of these steps with the algorithms of `config`, and compare with their saved credit.

    `penalties` are added to the credit, by environment. The `journal` provides the states of algorithms.
    """
    async with AsyncExitStack() as stack:
        entries = [entry for entry in config.train.env if env in (None, entry.name)]
        rescorers = {e.name: await _open(config, e, penalties.get(e.name), journal, stack) for e in entries}
        groups = CreditedGroups(files, steps, env, partial(progress, "looking for groups"))
        collector, not_trained = Collector(), Counter[str]()
        for number, step in enumerate(steps):
            progress("crediting steps", number, len(steps))
            rescored = await _rescore_step(groups.of_step(step), rescorers, config)
            collector.add_step(rescored)
            not_trained.update(entry.drop for entry in rescored if entry.drop)
        counted = {
            f"{name}/{key}": value
            for name, rescorer in rescorers.items()
            for key, value in rescorer.algorithm.tally.take().items()
        }
    comparison, advantages, changed = collector.comparison(), collector.advantages, collector.changed_groups
    return RescoreResult(comparison, advantages, dict(groups.left_out), dict(not_trained), counted, changed)


class _Rescorer(msgspec.Struct):
    """The algorithm of an environment, and what it reads besides rollouts."""

    env: str
    algorithm: Algorithm
    tasks: dict[str, Task] | None
    """By key; None if it reads no tasks."""
    reads_roles: bool
    """Whether it needs the roles of observed tokens."""
    states: Mapping[int, Any]
    """States of the algorithm by draw."""
    penalty: LengthPenalty | None

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
            fact = f"environment {self.env!r} no longer has this task, which the run had"
            raise BadInput(fact, key="task", value=key, fix="Use the data and the args that the run had.")
        return self.tasks[key]


async def _rescore_step(
    groups: Sequence[Sequence[SavedRollout]], rescorers: dict[str, _Rescorer], config: OrchestratorConfig
) -> list[Rescored]:
    enforced = [entry for entry in (*config.pre_batch_filters, *config.post_batch_filters) if entry.enforce]
    by_content = {entry.label for entry in enforced if not entry.READS_ADVANTAGES}
    by_credit = any(entry.READS_ADVANTAGES for entry in enforced)
    by_env: dict[str, list[list[Member]]] = {}
    for group in groups:
        rescorer = rescorers[group[0].rollout.env]
        members = [rescorer.member(saved, saved.drop_reason in by_content) for saved in group]
        by_env.setdefault(rescorer.env, []).append(members)
    rescored = []
    for env, of_env in by_env.items():
        rescorer = rescorers[env]
        rescored += await rescore(
            of_env,
            rescorer.algorithm,
            drop_without_advantage=by_credit,
            states=rescorer.states,
            penalty=rescorer.penalty,
        )
    return rescored


async def _open(
    config: OrchestratorConfig,
    entry: TrainEnvConfig,
    penalty: LengthPenaltyConfig | None,
    journal: Journal | None,
    stack: AsyncExitStack,
) -> _Rescorer:
    """Make and set up the algorithm of an environment; it is closed with the stack."""
    assert config.seq_len is not None
    algo = config.algo_of(entry)
    algorithm = make_algorithm(algo, MakeContext(config.seq_len, make_frozen_model))
    await algorithm.start(cast(Host, _Host(config, entry)))
    stack.push_async_callback(algorithm.stop)
    states: Mapping[int, Any] = {}
    if algorithm.replayable and journal is not None:
        states = await replay_states(journal, entry.name, algorithm)
        algorithm.tally.take()  # the replay does not count
    tasks = None
    if algo.reads_tasks:
        try:
            tasks = {task.key: task for task in tasks_of(load_environment(entry.id, entry.args), entry.name)}
        except Exception as error:  # user code, which may need data of the run's time
            fact = f"{algo.type} may look at the tasks, and the environment cannot be loaded as the run had it: {error}"
            raise BadInput(fact, key="env", value=entry.name) from error
    made = None if penalty is None else penalty.make(config.seq_len)
    return _Rescorer(entry.name, algorithm, tasks, algo.NEEDS_ROLES, states, made)


class _Host:
    """A `Host` that reads the model's files only when they are used, which most algorithms never do."""

    def __init__(self, config: OrchestratorConfig, entry: TrainEnvConfig) -> None:
        assert config.model.name is not None
        self.env = entry.name
        self.policy = MissingPolicy()
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
