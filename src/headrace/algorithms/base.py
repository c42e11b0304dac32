"""The interface of an algorithm: it maps finished rollouts to per-token credit.

Each training environment has its own instance. The orchestrator calls its hooks; an algorithm has nothing to do with
scheduling, packing or the training loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from headrace.config.algorithms import Invariant
from headrace.config.model import FrozenModelConfig, PastPolicyConfig, TeacherReference
from headrace.imports import name_of
from headrace.inference.client.reference import LimitedReference, Reference
from headrace.rollout.types import Rollout, Sample, Task

if TYPE_CHECKING:
    from renderers.base import Renderer

    from headrace.algorithms.kl import KlPenalty
    from headrace.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)

LARGEST_ADVANTAGE = float(np.finfo(np.float32).max)
"""Larger values would become infinite in float32, which the trainer reads."""


class Host(msgspec.Struct):
    """Resources of the orchestrator that an algorithm may use."""

    env: str
    """The environment whose rollouts are credited."""
    policy: Reference
    """The live policy, for scoring sequences. During `setup` its engines may not be up yet."""
    renderer: Renderer
    tokenizer: Tokenizer
    seq_len: int
    seed: int = 0
    temperature: float = 1.0
    """The sampling temperature of the environment, unless a turn sets its own."""
    notify: Callable[[str], None] = log.warning
    """Shows a notice to the user, in the log and on the terminal."""


class MakeContext(msgspec.Struct, frozen=True):
    """Resources of a run for constructing its algorithms."""

    seq_len: int
    connect: Callable[[FrozenModelConfig], Reference]
    """Returns a reference to a model that is served."""
    past: Reference | None = None
    """The run's own past policy, if a server of the run has it; None: the host's policy is used instead."""

    def reference(self, model: TeacherReference | None) -> Reference | None:
        """Return a reference to a frozen model or a past policy; None for the live policy, which the host has."""
        if isinstance(model, FrozenModelConfig):
            return self.connect(model)
        return self.past if isinstance(model, PastPolicyConfig) else None


class Tally:
    """Metrics that an algorithm collects until the next batch is logged: totals, means and maxima by name."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._means: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Add an amount to a total."""
        self._totals[name] = self._totals.get(name, 0.0) + amount

    def mean(self, name: str, total: float, count: float) -> None:
        """Add the sum of `count` values to a mean."""
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def largest(self, name: str, value: float) -> None:
        """Raise a maximum to a value."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def take(self) -> dict[str, float]:
        """Return all numbers and reset them."""
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        taken = {**self._totals, **means, **self._largest}
        self._totals, self._means, self._largest = {}, {}, {}
        return taken


class CreditTerm(msgspec.Struct, frozen=True, eq=False):
    """One term of a group's credit, shown by `headrace view`: arrays with one number per rollout."""

    name: str
    raw: np.ndarray
    """In units of reward."""
    baseline: np.ndarray | float
    """The number that is subtracted from `raw`."""
    values: np.ndarray
    """The term's part of the credit: `raw - baseline`, unless the formula also scales it."""
    formula: str
    key: str = ""
    """The key of the algorithm's section that sets the term; empty if there is none."""


class RolloutView:
    """A rollout as an algorithm sees it: everything can be read, only per-token streams can be written."""

    def __init__(self, rollout: Rollout, task: Task) -> None:
        self.rollout = rollout
        self.task = task

    @property
    def reward(self) -> float:
        return self.rollout.reward

    @property
    def group_id(self) -> str:
        """Unique per group in the whole run, restarts included: the same task may be open twice."""
        return self.rollout.group_id

    @property
    def agent(self) -> str:
        """The agent of the episode that produced the rollout."""
        return self.rollout.agent

    @property
    def episode(self) -> int:
        """The index of the episode in the group; several agents may have rollouts in one episode."""
        return self.rollout.episode

    @property
    def samples(self) -> list[Sample]:
        return self.rollout.samples

    @property
    def completion_length(self) -> int:
        """The number of tokens after the first prompt of each sample, to which per-token credit is aligned."""
        return sum(sample.completion_length for sample in self.samples)

    def assign_advantages(self, credit: float | Sequence[float] | np.ndarray) -> None:
        """Set the advantages: one number for all completion tokens, or one per token, samples end to end."""
        values = np.asarray(credit, np.float64)
        if values.ndim == 0:
            values = np.full(self.completion_length, values)
        if values.shape != (self.completion_length,):
            raise ValueError(
                f"{values.size} advantages for {self.completion_length} completion tokens of task "
                f"{self.rollout.task_key}: give a scalar, or one value per completion token"
            )
        invalid = ~(np.abs(values) <= LARGEST_ADVANTAGE)
        if invalid.any():
            fact = f"{values[invalid][0]} as an advantage of task {self.rollout.task_key}"
            raise ValueError(f"{fact}: advantages must be finite, and are kept as float32")
        start = 0
        for sample in self.samples:
            end = start + sample.completion_length
            sample.set_stream("advantages", np.concatenate([np.zeros(sample.prompt_length), values[start:end]]))
            start = end


def assign(group: Sequence[RolloutView], advantages: np.ndarray) -> None:
    """Set the advantage of each rollout on all its completion tokens."""
    for rollout, advantage in zip(group, advantages, strict=True):
        rollout.assign_advantages(float(advantage))


def as_finite_array(result: Any, function: Callable[..., Any]) -> np.ndarray:
    """Return the result of a user's `function` as float64; raise unless all numbers are finite."""
    try:
        values = np.asarray(result, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name_of(function)} returned something other than an array of numbers: {error}") from error
    if not np.isfinite(values).all():
        invalid = values[~np.isfinite(values)][0]
        raise ValueError(f"{name_of(function)} returned {invalid}: it must return finite numbers")
    return values


class Survivor(RolloutView):
    """A rollout of a complete batch, which the algorithm may still drop."""

    def __init__(self, rollout: Rollout, task: Task) -> None:
        super().__init__(rollout, task)
        self.drop_reason = ""
        self.drop_detail = ""

    def drop(self, reason: str, detail: str) -> None:
        """Leave the rollout out of the batch. `reason` is a short metric name, `detail` is for the log."""
        self.drop_reason = reason
        self.drop_detail = detail


class Algorithm:
    """Base of all algorithms: override the hooks of the stages where credit is computed.

    An algorithm with state (a running baseline, for example) changes it in `score_group` only and exchanges it as JSON:
    the state is committed with the credit that changed it, and survives restarts.
    """

    action_loss_type: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    """The loss component that trains the sampled tokens."""
    model_role: ClassVar[str] = ""
    """The role of the model in `teacher`, for example `teacher` or `judge`; empty: there is no such model."""
    promises: ClassVar[tuple[Invariant, ...]] = ()
    """Invariants that `headrace check-algorithm` tests, beside those of all algorithms."""
    modulates: ClassVar[tuple[Invariant, ...]] = ()
    """Promises that hold because credit is changed per token after the group was scored."""
    replayable: ClassVar[bool] = False
    """Whether the state can be recomputed from agents and rewards, which the journal has."""

    host: Host
    """Set before `setup` is called."""
    teacher: Reference
    """With a `model_role`: the frozen model that the run file names, or else the policy. It is checked, and limited to
    `max_concurrent` requests at once, before `setup` is called."""
    teacher_max_len: int | None = None
    """The teacher's `max_model_len`, if known."""
    max_concurrent: int = 32
    kl: KlPenalty | None = None
    """The KL penalty towards a reference policy, if the run file sets one."""

    @property
    def tally(self) -> Tally:
        """Metrics that are logged with the next batch, as `algo/ENV/NAME`."""
        tally: Tally = self.__dict__.setdefault("_tally", Tally())
        return tally

    async def start(self, host: Host) -> None:
        """Check the teacher and the penalty's reference, then call `setup`. Raises `BadInput`."""
        self.host = host
        self._frozen: Reference | None = getattr(self, "teacher", None)
        if self.model_role:
            self.teacher = LimitedReference(self._frozen or host.policy, self.max_concurrent)
            self.teacher_max_len = await self.teacher.check(host.tokenizer, host.seq_len, host.temperature)
        if self.kl is not None:
            await self.kl.start(host)
        await self.setup()

    async def stop(self) -> None:
        """Close the algorithm and its teacher, after `start` succeeded; the host closes the policy."""
        await self.close()
        if self._frozen is not None:
            await self._frozen.close()
        if self.kl is not None:
            await self.kl.stop()

    async def credit_rollout(self, rollout: RolloutView) -> None:
        """Call `score_rollout` with the KL penalty subtracted from the reward. Raises `ReferenceFailed`."""
        if self.kl is not None:
            await self.kl.measure(rollout.rollout)
        await self.score_rollout(self.with_penalty(rollout))

    async def credit_group(self, group: Sequence[RolloutView]) -> None:
        """Call `score_group` with the KL penalty subtracted from the rewards, and set a loss penalty's weights."""
        await self.score_group([self.with_penalty(rollout) for rollout in group])
        if self.kl is not None:
            self.kl.weigh(group)

    async def credit_batch(self, batch: Sequence[Survivor]) -> None:
        """Call `score_batch`, then score the rollouts that are left with the penalty's reference."""
        await self.score_batch(batch)
        if self.kl is not None:
            await self.kl.score_batch(batch)

    def with_penalty(self, rollout: RolloutView) -> RolloutView:
        """Return the view that credit is computed from: with the KL penalty, if any, subtracted from its reward."""
        return rollout if self.kl is None else self.kl.charge(rollout)

    async def setup(self) -> None:
        """Connect to other models before anything is sampled; raise `BadInput` for settings that cannot work."""

    async def close(self) -> None:
        """Release what `setup` opened; called only if `setup` succeeded."""

    async def score_rollout(self, rollout: RolloutView) -> None:
        """Credit one rollout when it arrives, without its siblings."""

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        """Credit the rollouts of one group, before filters."""

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        """Return the terms whose sum `score_group` would assign, without changing any state; empty: not available."""
        return []

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        """Credit a complete batch, after filters: the stage for requests to other models."""

    @classmethod
    def keeps_state(cls) -> bool:
        """Return whether the class overrides `state`."""
        return cls.state is not Algorithm.state

    def state(self) -> Any:
        """Return the state as JSON; None is the initial state."""
        return None

    def load_state(self, state: Any) -> None:
        """Restore a state that `state` returned."""
        raise NotImplementedError(f"{type(self).__name__} has a state but no load_state to take it back")
