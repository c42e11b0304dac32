"""What goes into the pipeline and what comes out: events that happened, actions that it asks for.

Events are facts, with everything that the decisions need; actions are carried out beside the loop, and their outcome
comes back as an event. Both are plain data, so that a test can play either side.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from headrace.inference.schema import Health
from headrace.rollout.types import Group, Rollout
from headrace.rollout.version import Version
from headrace.transport.journal import AlgorithmState, Entries


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Episode(msgspec.Struct, frozen=True):
    """One run of an environment on a task: the unit that takes a permit."""

    id: int
    kind: Kind
    group: Group
    index: int
    """Its place in the group."""

    @property
    def env(self) -> str:
        return self.group.task.env

    @property
    def name(self) -> str:
        """The same for the same episode of the same run, also when it is run again after a kill."""
        group = self.group
        if self.kind is Kind.TRAIN:
            return f"{group.draw_id}-{self.index}"
        return f"eval-{self.env}-{group.opened_version}-{group.task.key}-{self.index}"


# -- three levels, for training and evaluation alike ------------------------------------------------------------------


class ScoredGroup(msgspec.Struct, eq=False):
    """A complete group after its level of processing: what is left of it, and what is not and why."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]
    dropped: list[tuple[Rollout, str]]
    reason: str = ""
    """Why the whole group was given up, if it was."""
    arrived: int = 0
    """Rollouts that its episodes produced, of whatever kind, and below the tokens that were sampled for them."""
    sampled_tokens: int = 0
    credited: list[tuple[str, float]] = msgspec.field(default_factory=list)
    """Agent and reward of each rollout that an algorithm has credited, in the order in which it saw them."""
    state: AlgorithmState | None = None
    """The one right after this group; None if its algorithm keeps none."""
    filter_hits: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(sample) for rollout in self.rollouts for sample in rollout.samples)

    @property
    def credited_tokens(self) -> int:
        """Of all that was credited, prompts included, whether or not it is left."""
        dropped = (rollout for rollout, _ in self.dropped if rollout.error is None)
        credited = [*self.rollouts, *dropped] if self.credited else []
        return sum(len(sample) for rollout in credited for sample in rollout.samples)

    @property
    def oldest_version(self) -> int:
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=self.group.opened_version)


class TrainBatch(msgspec.Struct, eq=False):
    """Groups that fill one step. Processing decides which of their rollouts ship."""

    groups: list[ScoredGroup]
    kept: list[Rollout] = msgspec.field(default_factory=list)
    dropped: list[tuple[Rollout, str]] = msgspec.field(default_factory=list)
    filter_hits: dict[str, int] = msgspec.field(default_factory=dict)
    tallies: dict[str, float] = msgspec.field(default_factory=dict)
    """What the algorithms have counted since the last batch."""
    seconds: float = 0.0
    """How long its processing took."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout that holds a slot."""
        return [rollout for group in self.groups for rollout in group.rollouts]


class EvalBatch(msgspec.Struct, eq=False):
    """One finished epoch over an evaluation environment. Processing fills in `metrics`, named `eval/ENV/...`."""

    env: str
    version: Version
    group_size: int
    solved: float | None = None
    """The reward from which on an episode is solved."""
    opened_at: float = 0.0
    """On the pipeline's clock."""
    groups: list[ScoredGroup] = msgspec.field(default_factory=list)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout, those that failed included."""
        return [
            rollout
            for group in self.groups
            for rollout in (*group.rollouts, *(rollout for rollout, _ in group.dropped))
        ]


# -- events -----------------------------------------------------------------------------------------------------------


class Arrival(msgspec.Struct):
    """An episode has ended, with what it produced; whatever happened to it, at least one rollout."""

    episode: Episode
    rollouts: list[Rollout]


class GroupDone(msgspec.Struct):
    scored: ScoredGroup


class BatchDone(msgspec.Struct):
    batch: TrainBatch | EvalBatch


class Shipped(msgspec.Struct):
    """A batch is in the journal and the trainer can see it."""

    step: int


class Published(msgspec.Struct):
    """The trainer has published weights."""

    version: Version


class Loaded(msgspec.Struct):
    """The engines sample from these weights now."""

    version: Version


class Reported(msgspec.Struct):
    """The engines that answer have said how they are; by address."""

    engines: dict[str, Health]


class Tick(msgspec.Struct):
    """Nothing happened but time."""


class Stop(msgspec.Struct):
    """Someone asks the run to end here; a resumed one goes on."""


class Failed(msgspec.Struct):
    """Work beside the loop failed in a way that ends the run."""

    error: BaseException


Event = Arrival | GroupDone | BatchDone | Shipped | Published | Loaded | Reported | Tick | Stop | Failed


# -- actions ----------------------------------------------------------------------------------------------------------


class RunEpisode(msgspec.Struct):
    """Comes back as `Arrival`."""

    episode: Episode


class CancelEpisode(msgspec.Struct):
    """Its `Arrival` then carries this reason, unless it was on its way already."""

    episode: Episode
    reason: str


class ProcessGroup(msgspec.Struct):
    """Comes back as `GroupDone`."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]


class ProcessBatch(msgspec.Struct):
    """Comes back as `BatchDone`, with the batch filled in."""

    batch: TrainBatch | EvalBatch


class Ship(msgspec.Struct):
    """Write the batch, commit, announce. Comes back as `Shipped`."""

    step: int
    incarnation: int
    batch: TrainBatch
    entries: Entries
    dropped: list[tuple[Rollout, str]]
    """For the dump: rollouts that were dropped since the last step."""
    metrics: dict[str, float]


class Commit(msgspec.Struct):
    """Commit what happened since, without a batch."""

    entries: Entries


class Load(msgspec.Struct):
    """Bring the engines to these weights. Comes back as `Loaded`."""

    version: Version


class ReportEval(msgspec.Struct):
    batch: EvalBatch


Action = RunEpisode | CancelEpisode | ProcessGroup | ProcessBatch | Ship | Commit | Load | ReportEval
