"""What the journal records: draws and their outcomes, files, states of algorithms, totals."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.rollout.digest import digest_of
from headrace.rollout.types import Rollout

GROUP_FAILED = "group_failed"
"""Drop reason of a successful rollout in a group that could not be scored because another one failed."""
ON_POLICY = "on_policy"
"""Drop reason of groups that are left over when a step ships, with `max_async_level = 0`."""
NOT_TRAINABLE = "not_trainable"
"""Drop reason of a draw without a trainable rollout; also in files for such rollouts, which do not count as dropped."""
NO_FAILURE = frozenset({"off_policy", ON_POLICY, "max_steps", "task_gone", NOT_TRAINABLE, "cancelled"})
"""Reasons for a draw without credit that do not count as failures of its environment."""


class Draw(msgspec.Struct, frozen=True):
    """One prompt taken from a source: the `position`-th of its environment."""

    id: int
    env: str
    task_key: str
    position: int
    observed: int | None = 0
    """Number of rewards that its environment's sampler had observed; 0 if it does not observe, None if unknown."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file of the run directory, as it was when it was recorded."""

    name: str
    """Relative to the run directory."""
    size: int
    digest: str

    @classmethod
    def of(cls, root: Path, path: Path) -> FileRecord:
        content = path.read_bytes()
        return cls(path.relative_to(root).as_posix(), len(content), digest_of(content))


class Outcome(msgspec.Struct):
    """The outcome of a draw and of its rollouts."""

    draw: int
    reason: str = ""
    """Why it was dropped; empty if it was shipped."""
    rollouts: int = 0
    tokens: int = 0
    drops: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of its rollouts that were not shipped, by reason."""
    credit: int | None = None
    rewards: list[tuple[str, float]] = msgspec.field(default_factory=list)
    """Agent and reward of each credited rollout, in the order in which the algorithm received them."""
    credited_tokens: int = 0
    """Tokens of the credited rollouts, prompts included."""


class DrawResult(msgspec.Struct):
    """The result of a finished draw, as curricula and circuit breakers observe it."""

    draw: int
    env: str
    task_key: str
    rewards: list[float]
    """Rewards of its credited rollouts; empty if none was credited."""
    failed: int = 0
    """Number of its episodes, if no rollout was credited because all of them failed."""
    error: str = ""
    """Reason and detail of the last failure, for messages; not in the journal."""
    step: int = 0
    """The batch that was being collected when it finished."""
    tokens: int = 0
    """Tokens of its credited rollouts, prompts included; 0 if unknown."""
    surplus: bool = False
    """Whether it was dropped after its credit because the batch was full, at level 0. Only set in past results."""


class Totals(msgspec.Struct):
    """Sums over all draws that have an outcome, over restarts."""

    rollouts: int = 0
    tokens: int = 0
    drops: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.rollouts += outcome.rollouts
        self.tokens += outcome.tokens
        for reason, count in outcome.drops.items():
            self.drops[reason] = self.drops.get(reason, 0) + count

    def copy(self) -> Totals:
        return Totals(self.rollouts, self.tokens, dict(self.drops))


class Clock(msgspec.Struct, frozen=True):
    """Time and evaluation tokens of the whole run."""

    seconds: float = 0.0
    eval_tokens: int = 0


class AlgorithmState(msgspec.Struct, frozen=True):
    """The saved state of an algorithm."""

    algorithm: str
    """Its class, as `package.module:Name`."""
    json: bytes


class Entries(msgspec.Struct):
    """The content of one commit. Totals and states are those after its outcomes."""

    drawn: list[Draw]
    outcomes: list[Outcome]
    totals: Totals
    states: dict[str, AlgorithmState] = msgspec.field(default_factory=dict)
    """By environment."""
    clock: Clock = Clock()
    dropped: list[tuple[Rollout, str]] = msgspec.field(default_factory=list)
    """Rollouts of the outcomes that were dropped, and why: for the rollout file that is written before the commit."""
