"""What an algorithm is: one mapping from finished rollouts to per-token credit.

It is configured per environment and constructed once for it. The orchestrator calls its hooks; it never touches
scheduling, packing or the training loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from headrace.algorithms.tally import Tally
from headrace.inference.client.reference import Reference
from headrace.rollout.types import Rollout, Sample, Task

if TYPE_CHECKING:
    from renderers.base import Renderer

    from headrace.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)

LARGEST_ADVANTAGE = float(np.finfo(np.float32).max)
"""What is larger would be infinite to the trainer."""


class Host(msgspec.Struct):
    """What the orchestrator owns and lends to an algorithm."""

    env: str
    """The environment that it credits."""
    policy: Reference
    """The live policy, to score sequences with. Its engines may not be up yet in `setup`."""
    renderer: Renderer
    tokenizer: Tokenizer
    seq_len: int
    seed: int = 0
    temperature: float = 1.0
    """What the environment's turns are sampled at, unless it says otherwise."""
    notify: Callable[[str], None] = log.warning
    """Say something to the user, in the log and on the terminal of the run."""


class RolloutView:
    """A rollout as an algorithm may see it: read everything, write only per-token streams."""

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
        """Whose part in the episode it is."""
        return self.rollout.agent

    @property
    def episode(self) -> int:
        """The place of its episode in the group: several agents may have played in it."""
        return self.rollout.episode

    @property
    def samples(self) -> list[Sample]:
        return self.rollout.samples

    @property
    def completion_length(self) -> int:
        """What per-token credit is aligned to: all that follows the first prompt of each sample."""
        return sum(sample.completion_length for sample in self.samples)

    def assign_advantages(self, credit: float | Sequence[float] | np.ndarray) -> None:
        """A scalar for every completion token, or one value each, the rollout's samples end to end."""
        given = np.asarray(credit, np.float64)
        values = np.full(self.completion_length, given) if given.ndim == 0 else given
        if values.shape != (self.completion_length,):
            raise ValueError(
                f"{values.size} advantages for {self.completion_length} completion tokens of task "
                f"{self.rollout.task_key}: give a scalar, or one value per completion token"
            )
        unfit = ~(np.abs(values) <= LARGEST_ADVANTAGE)
        if unfit.any():
            raise ValueError(
                f"{values[unfit][0]} as an advantage of task {self.rollout.task_key}: advantages must be finite, and "
                "are kept as float32"
            )
        start = 0
        for sample in self.samples:
            end = start + sample.completion_length
            sample.set_stream("advantages", np.concatenate([np.zeros(sample.prompt_length), values[start:end]]))
            start = end


class Survivor(RolloutView):
    """A rollout that will be shipped, unless the algorithm finds at this last moment that it cannot be trained on."""

    def __init__(self, rollout: Rollout, task: Task) -> None:
        super().__init__(rollout, task)
        self.drop_reason = ""
        self.drop_detail = ""

    def drop(self, reason: str, detail: str) -> None:
        """Do not ship it. `reason` is a short counter name, `detail` is for people."""
        self.drop_reason = reason
        self.drop_detail = detail


class Algorithm:
    """Base of all algorithms: override the hooks of the stages where credit is known.

    One that learns from group to group (a running baseline, say) changes its state in `score_group` alone, and gives
    and takes it as JSON: it is committed with the credit that changed it, and survives every restart.
    """

    action_loss_type: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    """The loss that trains what the policy sampled."""
    model_role: ClassVar[str] = ""
    """What it calls the other model that it needs, if any: `teacher`, say."""
    promises: ClassVar[tuple[str, ...]] = ()
    """What `headrace check-algorithm` shall hold it to, beyond what holds for all: shift, zero_sum, signs, order."""

    modulates: ClassVar[tuple[str, ...]] = ()
    """Promises that hold because credit is changed per token after the group was scored."""
    replayable: ClassVar[bool] = False
    """Whether its state follows from agents and rewards alone: the journal has those, and it can be computed again."""

    host: Host
    """There from `setup` on."""

    @property
    def tally(self) -> Tally:
        """Numbers to be logged with the next batch, as `algo/ENV/NAME`."""
        tally: Tally = self.__dict__.setdefault("_tally", Tally())
        return tally

    async def setup(self) -> None:
        """Connect what it needs, before anything is sampled; raise `BadInput` for what cannot work."""

    async def close(self) -> None:
        """Give back what `setup` opened; called where that came to its end."""

    async def score_rollout(self, rollout: RolloutView) -> None:
        """On arrival, without siblings."""

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        """The surviving rollouts of one group, before filters."""

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        """What will be shipped, after filters: the stage for calls to other models."""

    @classmethod
    def keeps_state(cls) -> bool:
        """Whether it learns from group to group."""
        return cls.state is not Algorithm.state

    def state(self) -> Any:
        """What it has learned, as JSON; None is what it begins with."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from a state that `state` once gave."""
        raise NotImplementedError(f"{type(self).__name__} has a state but no load_state to take it back")
