"""Detection of runs that produce nothing to train on: failed episodes in a row, and empty batches in a row.

Methods that record a result raise `RunFailed` if the run must end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Set

from headrace.algorithms.teacher import NO_REFERENCE
from headrace.errors import Failure
from headrace.orchestrator.gate import GATED
from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.transport.journal_entries import GROUP_FAILED

log = logging.getLogger(__name__)

NO_ADVANTAGE = "zero_advantage"
"""Drop reason of the filter of that name."""
CAUSES = {
    "not_trainable": ("no rollout was trainable", "Let the environment set `trainable` on the agents that learn"),
    GATED: (
        "the gate of the curriculum rejected every group",
        "Widen its range, or see why rewards are equal within groups",
    ),
    NO_REFERENCE: ("the model that scores them returned no scores", "Check that it is up; the log has its last error"),
}
"""Likely cause of an empty batch and what to change, by the drop reason of most rollouts."""
MIN_FAILED_EPISODES = 32
"""Failed episodes in a row that end a run; two batches of them if that is more."""


class RunFailed(Failure):
    """The run cannot continue. The message names the cause."""


class EmptyBatches:
    """Counts failed episodes and empty batches in a row; `max_empty_batches` empty batches end the run, if set.

    Failures end a run only once every one of the `environments` has failed: the others may just be slower.
    """

    def __init__(self, max_empty_batches: int | None, environments: Set[str]) -> None:
        self._max_empty_batches = max_empty_batches
        self._environments = environments
        self._failures: Counter[str] = Counter()
        """Failed episodes by environment since the last success of any."""
        self._dropped: Counter[str] = Counter()
        """Drop reasons of rollouts since the last group with a remaining rollout."""
        self._rewards: list[float] = []
        """Rewards of the rollouts that were dropped for having no advantage."""
        self._empty_batches = 0
        self._cause = self._advice = ""
        """Likely cause of the last empty batch, and what to change."""

    @property
    def problem(self) -> str:
        """Return why no batch ships although rollouts arrive, and a fix; empty if the last batch was not empty."""
        if not self._empty_batches:
            return ""
        limit = self._max_empty_batches
        stop = (
            "Sampling continues: Ctrl-C stops it, orchestrator.max_empty_batches = N ends a run after N such batches"
            if limit is None
            else f"The run ends after {limit} (orchestrator.max_empty_batches)"
        )
        count = f"{self._empty_batches} batch{'es' * (self._empty_batches > 1)}"
        return f"{count} in a row had nothing to train on: {self._cause}. {self._advice}. {stop}."

    def record_group(self, scored: ScoredGroup, step: int, rollouts_per_batch: int) -> None:
        """Record a processed group. Groups without a remaining rollout count as an empty batch once they fill one."""
        errors = [rollout for rollout, reason in scored.dropped if rollout.error is not None and reason != GROUP_FAILED]
        if len(errors) < scored.arrived:
            self._failures.clear()
        else:
            self._failures[scored.group.task.env] += len(errors)
        limit = max(MIN_FAILED_EPISODES, 2 * rollouts_per_batch, 2 * scored.group.size)  # a batch has whole groups
        if self._failures.total() >= limit and self._environments <= self._failures.keys():
            last = errors[-1]
            assert last.error is not None
            raise RunFailed(
                f"{self._failures.total()} episodes in a row failed and none succeeded; the last, in environment "
                f"{last.env!r}: {last.error.reason}: {last.error.detail}"
            )
        if scored.rollouts:
            self._dropped.clear()
            self._rewards.clear()
            return
        self._dropped.update(reason for _, reason in scored.dropped)
        self._rewards += [rollout.reward for rollout, reason in scored.dropped if reason == NO_ADVANTAGE]
        self._dropped["not_trainable"] += scored.arrived - len(scored.dropped)
        if self._dropped.total() >= rollouts_per_batch:
            dropped, self._dropped = self._dropped, Counter()
            rewards, self._rewards = self._rewards, []
            self._record_empty(step, dropped, rewards)

    def record_batch(self, batch: TrainBatch, step: int) -> None:
        if batch.kept:
            self._empty_batches = 0
        else:
            rewards = [rollout.reward for rollout, reason in batch.dropped if reason == NO_ADVANTAGE]
            self._record_empty(step, Counter(reason for _, reason in batch.dropped), rewards)

    def _record_empty(self, step: int, reasons: Counter[str], rewards: list[float]) -> None:
        counts = +reasons
        self._cause, self._advice = likely_cause(counts.most_common(1)[0][0], rewards)
        self._empty_batches += 1
        words = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
        message = f"a batch for step {step} had nothing to train on ({words}); {self._cause}. {self._advice}"
        if self._empty_batches.bit_count() == 1:  # a power of two: there may be several in a second
            log.warning("%s (%d in a row)", message, self._empty_batches)
        if self._max_empty_batches is not None and self._empty_batches >= self._max_empty_batches:
            raise RunFailed(f"{self._empty_batches} empty batches in a row: {message}")


def likely_cause(reason: str, rewards: list[float]) -> tuple[str, str]:
    """Return the likely cause of an empty batch, and what to change."""
    if reason in CAUSES:
        return CAUSES[reason]
    if reason != NO_ADVANTAGE:
        return (
            f"most were dropped for {reason!r}",
            "Look for a broken model, a filter that is too strict, or a failing environment",
        )
    if max(rewards) == min(rewards):
        return (
            f"every reward was {rewards[0]:g}",
            "Give partial credit, take easier or harder tasks, raise group_size or the sampling temperature, or "
            "train with SFT first",
        )
    return (
        "rewards were equal within each group",
        "Use rewards that differ between the answers to one task, raise group_size or the sampling temperature",
    )
