"""What has happened since the last commit to the journal, and the run's totals."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from headrace.orchestrator.journal import Draw, Totals
from headrace.orchestrator.train_sink import ReadyBatch, ScoredGroup
from headrace.rollout.types import Rollout

DUMPED_DROPS = 4096
"""Dropped rollouts that the next step's dump shows at most; all of them are counted."""


class Entries(msgspec.Struct):
    """What one commit takes with it."""

    drawn: list[Draw]
    dropped_draws: dict[int, str]
    dropped_rollouts: list[tuple[Rollout, str]]
    totals: Totals


class Ledger:
    """Collects draws and drops on the event loop; `take` hands them over to be written elsewhere."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._drawn: list[Draw] = []
        self._dropped_draws: dict[int, str] = {}
        self._dropped_rollouts: list[tuple[Rollout, str]] = []
        self._started = self._step_started = time.monotonic()
        self._seconds_before = totals.seconds
        self._tokens_at_step = totals.tokens_sampled

    def draw(self, draw: Draw) -> None:
        self._drawn.append(draw)

    def sampled(self, rollouts: Iterable[Rollout], *, trained: bool) -> None:
        """Rollouts have arrived; those of evaluation count only their tokens."""
        for rollout in rollouts:
            self._totals.tokens_sampled += rollout.completion_tokens
            self._totals.rollouts += trained

    def drop(self, rollouts: Iterable[tuple[Rollout, str]]) -> None:
        """Count rollouts that will not be trained, each with its reason."""
        for rollout, reason in rollouts:
            self._totals.drop(reason)
            self._dropped_rollouts.append((rollout, reason))
        del self._dropped_rollouts[:-DUMPED_DROPS]

    def drop_scored(self, scored: ScoredGroup) -> None:
        """What a group lost to errors and pre-batch filters, and its draw if nothing is left."""
        self.drop(scored.dropped)
        if not scored.rollouts:
            self._dropped_draws[scored.group.draw_id] = scored.reason

    def drop_groups(self, groups: Iterable[ScoredGroup], reason: str) -> None:
        """Whole groups that were finished and are of no use any more."""
        for group in groups:
            self._dropped_draws[group.group.draw_id] = reason
            self.drop((rollout, reason) for rollout in group.rollouts)

    def drop_filtered(self, batch: ReadyBatch) -> None:
        """What post-batch filters took out of a batch, and the draws of which nothing is left."""
        self.drop(batch.dropped)
        for group in batch.lost_groups():
            self._dropped_draws[group.group.draw_id] = batch.dropped_reason(group)

    def drop_gone(self, draws: Iterable[Draw]) -> None:
        """Open draws of an earlier process that have no task any more."""
        self._dropped_draws.update({draw.id: "task_gone" for draw in draws})

    def take(self) -> Entries:
        """Hand over everything since the last call."""
        self._totals.seconds = self._seconds_before + time.monotonic() - self._started
        totals = msgspec.structs.replace(self._totals, dropped=dict(self._totals.dropped))
        entries = Entries(self._drawn, self._dropped_draws, self._dropped_rollouts, totals)
        self._drawn, self._dropped_draws, self._dropped_rollouts = [], {}, []
        return entries

    def pace(self) -> dict[str, float]:
        """Metrics: how long the step took, and how fast was sampled meanwhile."""
        now = time.monotonic()
        seconds, self._step_started = now - self._step_started, now
        tokens = self._totals.tokens_sampled - self._tokens_at_step
        self._tokens_at_step = self._totals.tokens_sampled
        return {"perf/sampled_tokens_per_second": tokens / max(seconds, 1e-9), "time/step": seconds}


def progress(totals: Totals) -> dict[str, float]:
    """Metrics: counts over the whole run, restarts included."""
    return {
        "progress/rollouts": totals.rollouts,
        "progress/tokens_sampled": totals.tokens_sampled,
        "progress/seconds": totals.seconds,
        **{f"progress/dropped/{reason}": count for reason, count in totals.dropped.items()},
    }
