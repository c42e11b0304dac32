"""How long a run has had nothing to train on, what took it, and whether that has lasted too long.

What is lost now and then costs only itself. Every answer is a sentence that says why the run cannot go on, or None.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Set

from headrace.algorithms.distillation import NO_REFERENCE
from headrace.orchestrator.gate import GATED
from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.transport.journal import GROUP_FAILED

log = logging.getLogger(__name__)

NO_ADVANTAGE = "zero_advantage"
FAILURES = 32
"""Failed episodes in a row that end a run, unless two batches are more."""


class Drought:
    """Failed episodes in a row end a run, and so do `max_empty_batches` empty batches, if it is set.

    As long as one of the `environments` has not failed, it may only be slower than those that have.
    """

    def __init__(self, max_empty_batches: int | None, environments: Set[str]) -> None:
        self._max_empty_batches = max_empty_batches
        self._environments = environments
        self._failures: Counter[str] = Counter()
        """By environment, since any episode last ended well."""
        self._lost: Counter[str] = Counter()
        """Why rollouts were lost since a group last had something to train on."""
        self._rewards: list[float] = []
        """What those had that were lost for having no advantage."""
        self._empty_batches = 0
        self._cause = ""
        """What emptied the last of them, and below what to change."""
        self._advice = ""

    @property
    def story(self) -> str | None:
        """Why nothing ships although rollouts arrive; None as long as something does."""
        if not self._empty_batches:
            return None
        limit = self._max_empty_batches
        stop = (
            "Sampling goes on: Ctrl-C stops it, orchestrator.max_empty_batches = N ends a run after N such batches"
            if limit is None
            else f"The run ends after {limit} (orchestrator.max_empty_batches)"
        )
        return (
            f"{_batches(self._empty_batches)} in a row had nothing to train on: {self._cause}. {self._advice}. {stop}."
        )

    def on_group(self, scored: ScoredGroup, step: int, rollouts_per_batch: int) -> str | None:
        """Groups that leave nothing count as an empty batch as soon as they would have filled one."""
        errors = [rollout for rollout, reason in scored.dropped if rollout.error is not None and reason != GROUP_FAILED]
        if len(errors) < scored.arrived:
            self._failures.clear()
        else:
            self._failures[scored.group.task.env] += len(errors)
        batch = max(rollouts_per_batch, scored.group.size)  # it holds whole groups
        if self._failures.total() >= max(FAILURES, 2 * batch) and self._environments <= self._failures.keys():
            last = errors[-1]
            assert last.error is not None
            return (
                f"{self._failures.total()} episodes in a row failed and none succeeded; the last, in environment "
                f"{last.env!r}: {last.error.reason}: {last.error.detail}"
            )
        if scored.rollouts:
            self._lost.clear()
            self._rewards.clear()
            return None
        self._lost.update(reason for _, reason in scored.dropped)
        self._rewards += [rollout.reward for rollout, reason in scored.dropped if reason == NO_ADVANTAGE]
        self._lost["not_trainable"] += scored.arrived - len(scored.dropped)
        if self._lost.total() < rollouts_per_batch:
            return None
        lost, self._lost = self._lost, Counter()
        rewards, self._rewards = self._rewards, []
        return self._on_empty(step, lost, rewards)

    def on_batch(self, batch: TrainBatch, step: int) -> str | None:
        if batch.kept:
            self._empty_batches = 0
            return None
        reasons = Counter(reason for _, reason in batch.dropped)
        return self._on_empty(step, reasons, [r.reward for r, reason in batch.dropped if reason == NO_ADVANTAGE])

    def _on_empty(self, step: int, reasons: Counter[str], rewards: list[float]) -> str | None:
        counts = +reasons
        self._cause, self._advice = likely_cause(counts.most_common(1)[0][0], rewards)
        self._empty_batches += 1
        words = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
        message = f"a batch for step {step} had nothing to train on ({words}); {self._cause}. {self._advice}"
        if self._empty_batches.bit_count() == 1:  # ever more rarely: there may be several in a second
            log.warning("%s (%s in a row)", message, _batches(self._empty_batches))
        if self._max_empty_batches is None or self._empty_batches < self._max_empty_batches:
            return None
        return f"{self._empty_batches} batches in a row without a signal: {message}"


def _batches(count: int) -> str:
    return f"{count} batch{'es' * (count > 1)}"


def likely_cause(reason: str, rewards: list[float]) -> tuple[str, str]:
    """Return what most likely emptied a batch, and what to change about it."""
    if reason == "not_trainable":
        return "no rollout was trainable", "Let the environment set `trainable` on the agents that learn"
    if reason == GATED:
        return (
            "the gate of the curriculum rejected every group",
            "Widen its range, or see why rewards are equal within groups",
        )
    if reason == NO_REFERENCE:
        return "the model that scores them gave no scores", "Check that it is up; the log has its last error"
    if reason != NO_ADVANTAGE:
        return (
            f"{reason!r} took them",
            "Look for a broken model, a filter too strict, or a failing environment",
        )
    if max(rewards) == min(rewards):
        return (
            f"every reward was {rewards[0]:g}",
            "Give partial credit, take easier or harder tasks, raise group_size or the sampling temperature, or "
            "train with SFT first",
        )
    return (
        "rewards were equal within each group",
        "Give rewards that tell the answers to one task apart, raise group_size or the sampling temperature",
    )
