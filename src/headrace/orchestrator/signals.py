"""Events that the pipeline receives and actions that it returns.

Events carry everything that the decisions need. Actions run in the background, and their results return as events. Both
are plain data, so a test can stand in for either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from headrace.inference.schema import Health
from headrace.rollout.types import Group, Rollout
from headrace.rollout.version import Version
from headrace.transport.journal_entries import AlgorithmState, Entries


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Episode(msgspec.Struct, frozen=True):
    """One run of an environment on a task: occupies one slot in flight."""

    id: int
    kind: Kind
    group: Group
    index: int
    """Position in the group."""

    @property
    def env(self) -> str:
        return self.group.task.env

    @property
    def name(self) -> str:
        """Return a name that identifies the episode in its run, also if it is repeated after a kill."""
        group = self.group
        if self.kind is Kind.TRAIN:
            return f"{group.draw_id}-{self.index}"
        return f"eval-{self.env}-{group.opened_version}-{group.task.key}-{self.index}"


# -- results of processing, for training and evaluation ---------------------------------------------------------------


class ScoredGroup(msgspec.Struct, eq=False):
    """A complete group after processing: the remaining rollouts, and the dropped ones with their reasons."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]
    dropped: list[tuple[Rollout, str]]
    reason: str = ""
    """Why the whole group was cancelled, if it was."""
    untrainable: list[Rollout] = msgspec.field(default_factory=list)
    """Rollouts of agents that are not trained: neither remaining nor dropped."""
    arrived: int = 0
    """Rollouts that its episodes produced, failed ones included."""
    sampled_tokens: int = 0
    credited: list[tuple[str, float]] = msgspec.field(default_factory=list)
    """Agent and reward of each rollout that was passed to the algorithm, in that order."""
    state: AlgorithmState | None = None
    """Algorithm state right after this group; None if the algorithm has no state."""
    filter_hits: dict[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, kind: Kind, group: Group, rollouts: Sequence[Rollout], cancelled: str = "") -> ScoredGroup:
        """Return a group before credit: failed rollouts are dropped, and all if the group was `cancelled`."""
        kept = [] if cancelled else [rollout for rollout in rollouts if rollout.error is None]
        lost = rollouts if cancelled else [rollout for rollout in rollouts if rollout.error is not None]
        dropped = [(rollout, cancelled if rollout.error is None else rollout.error.reason) for rollout in lost]
        tokens = sum(rollout.completion_tokens for rollout in rollouts)
        return cls(kind, group, kept, dropped, cancelled, arrived=len(rollouts), sampled_tokens=tokens)

    @property
    def all_rollouts(self) -> list[Rollout]:
        """Return the remaining rollouts, then the dropped ones."""
        return [*self.rollouts, *(rollout for rollout, _ in self.dropped)]

    @property
    def tokens(self) -> int:
        return sum(len(sample) for rollout in self.rollouts for sample in rollout.samples)

    @property
    def credited_tokens(self) -> int:
        """Return the tokens, prompts included, of all credited rollouts, dropped ones included."""
        dropped = (rollout for rollout, _ in self.dropped if rollout.error is None)
        credited = [*self.rollouts, *dropped] if self.credited else []
        return sum(len(sample) for rollout in credited for sample in rollout.samples)

    @property
    def oldest_version(self) -> int:
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=self.group.opened_version)


class TrainBatch(msgspec.Struct, eq=False):
    """The groups of one step. Processing fills in which of their rollouts are kept."""

    groups: list[ScoredGroup]
    step: int = 0
    kept: list[Rollout] = msgspec.field(default_factory=list)
    dropped: list[tuple[Rollout, str]] = msgspec.field(default_factory=list)
    filter_hits: dict[str, int] = msgspec.field(default_factory=dict)
    tallies: dict[str, float] = msgspec.field(default_factory=dict)
    """Counts of the algorithms since the last batch."""
    seconds: float = 0.0
    """Duration of the processing."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the rollouts of all groups, before the post-batch filters."""
        return [rollout for group in self.groups for rollout in group.rollouts]


class EvalBatch(msgspec.Struct, eq=False):
    """One finished pass over an evaluation environment. Processing fills in `metrics`, named `eval/ENV/...`."""

    env: str
    version: Version
    group_size: int
    solved: float | None = None
    """Reward threshold of a solved episode."""
    opened_at: float = 0.0
    """Time on the pipeline's clock."""
    pinned: bool = False
    """Whether all of it must be sampled from one version."""
    missing: int = 0
    """Groups that are not complete yet."""
    groups: list[ScoredGroup] = msgspec.field(default_factory=list)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """Return all rollouts, failed ones included."""
        return [rollout for group in self.groups for rollout in group.all_rollouts]


# -- events -----------------------------------------------------------------------------------------------------------


class Arrival(msgspec.Struct):
    """An episode ended. It has at least one rollout: a failure is a rollout with an error."""

    episode: Episode
    rollouts: list[Rollout]


class GroupDone(msgspec.Struct):
    scored: ScoredGroup


class BatchDone(msgspec.Struct):
    batch: TrainBatch | EvalBatch


class Shipped(msgspec.Struct):
    """A batch is committed to the journal and visible to the trainer."""

    step: int


class Published(msgspec.Struct):
    """The trainer has published weights."""

    version: Version


class Loaded(msgspec.Struct):
    """The engines now sample from these weights."""

    version: Version


class Reported(msgspec.Struct):
    """Health reports of the reachable engines, by address."""

    engines: dict[str, Health]


class Tick(msgspec.Struct):
    """Time passed; nothing else happened."""


class Stop(msgspec.Struct):
    """Stop the run; it can be resumed."""


class Failed(msgspec.Struct):
    """Background work failed with an error that ends the run."""

    error: BaseException


Event = Arrival | GroupDone | BatchDone | Shipped | Published | Loaded | Reported | Tick | Stop | Failed


# -- actions ----------------------------------------------------------------------------------------------------------


class RunEpisode(msgspec.Struct):
    """Start an episode. Results in an `Arrival`."""

    episode: Episode


class CancelEpisode(msgspec.Struct):
    """Cancel an episode. Its `Arrival` has an error with this reason, unless it had already ended."""

    episode: Episode
    reason: str


class ProcessGroup(msgspec.Struct):
    """Score, credit and filter a complete group. Results in a `GroupDone`."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]


class ProcessBatch(msgspec.Struct):
    """Filter and score a training batch, or compute the metrics of an evaluation. Results in a `BatchDone`."""

    batch: TrainBatch | EvalBatch


class Ship(msgspec.Struct):
    """Write the batch, commit, announce. Results in a `Shipped`."""

    step: int
    incarnation: int
    batch: TrainBatch
    entries: Entries
    metrics: dict[str, float]


class Commit(msgspec.Struct):
    """Commit entries to the journal without a batch."""

    entries: Entries


class Load(msgspec.Struct):
    """Load these weights into the engines. Results in a `Loaded`."""

    version: Version


class ReportEval(msgspec.Struct):
    batch: EvalBatch


Action = RunEpisode | CancelEpisode | ProcessGroup | ProcessBatch | Ship | Commit | Load | ReportEval
