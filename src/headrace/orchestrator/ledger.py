"""What has happened since the last commit to the journal, and the run's totals.

Groups are entered in the order in which they were credited, and leave in that order: a commit takes the longest prefix
whose fate is known. The algorithms' states that go with it are those right after its last group, so that what is in
the journal is always a moment that the algorithm has really been through, and none of the draws in it is open.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.rollout.types import Rollout
from headrace.transport.journal import AlgorithmState, Clock, Draw, Entries, Outcome, Totals

DUMPED_DROPS = 4096
"""Dropped rollouts that the next step's dump shows at most; all of them are counted."""


class _Entry(msgspec.Struct):
    """A credited group, from its credit to its commit."""

    env: str
    outcome: Outcome
    state: AlgorithmState | None
    sealed: bool = False


class Ledger:
    """Collects on the event loop; `take` hands over what may be committed, to be written elsewhere."""

    def __init__(self, totals: Totals, clock: Clock, next_credit: int, now: float) -> None:
        self._totals = totals
        self._eval_tokens = clock.eval_tokens
        self._began = now - clock.seconds
        self._next_credit = next_credit
        self._drawn: list[Draw] = []
        self._credited: deque[_Entry] = deque()
        self._entry_of: dict[int, _Entry] = {}
        self._never_credited: list[Outcome] = []
        self._dropped_rollouts: deque[tuple[Rollout, str]] = deque(maxlen=DUMPED_DROPS)
        self._step = _StepCounts(now)

    @property
    def has_outcomes(self) -> bool:
        """Whether a commit would record what became of any draw."""
        return bool(self._never_credited) or bool(self._credited and self._credited[0].sealed)

    def draw(self, draw: Draw) -> None:
        self._drawn.append(draw)

    def arrived(self, rollouts: Iterable[Rollout], *, training: bool) -> None:
        for rollout in rollouts:
            self._step.tokens += rollout.completion_tokens
            if not training:
                self._eval_tokens += rollout.completion_tokens
            elif rollout.error is not None:
                self._step.errors[rollout.error.reason] += 1

    def enter(self, scored: ScoredGroup) -> None:
        """A training group has been processed: count it, and seal it if nothing of it is left."""
        outcome = Outcome(scored.group.draw_id, rollouts=scored.arrived, tokens=scored.sampled_tokens)
        reason = scored.reason or commonest(reason for _, reason in scored.dropped)
        self._step.filter_hits.update(scored.filter_hits)
        self._drop_rollouts(outcome, scored.dropped)
        if scored.credited:
            outcome.credit, outcome.rewards = self._next_credit, scored.credited
            outcome.credited_tokens = scored.credited_tokens
            self._next_credit += 1
            entry = _Entry(scored.group.task.env, outcome, scored.state)
            self._credited.append(entry)
            self._entry_of[outcome.draw] = entry
            if not scored.rollouts:
                self._seal(outcome.draw, reason)
        else:
            outcome.reason = reason
            self._never_credited.append(outcome)

    def drop_groups(self, groups: Iterable[ScoredGroup], reason: str) -> None:
        """Whole groups that were finished and are of no use any more."""
        for group in groups:
            self._drop_rollouts(
                self._entry_of[group.group.draw_id].outcome, [(rollout, reason) for rollout in group.rollouts]
            )
            self._seal(group.group.draw_id, reason)

    def settle(self, batch: TrainBatch) -> None:
        """A batch is processed: what its filters took out is dropped, and so are draws of which nothing is left."""
        self._step.filter_hits.update(batch.filter_hits)
        dropped: dict[int, list[tuple[Rollout, str]]] = {}
        for rollout, reason in batch.dropped:
            dropped.setdefault(rollout.draw_id, []).append((rollout, reason))
        kept = {rollout.draw_id for rollout in batch.kept}
        for group in batch.groups:
            draw = group.group.draw_id
            lost = dropped.get(draw, [])
            self._drop_rollouts(self._entry_of[draw].outcome, lost)
            self._seal(draw, "" if draw in kept else commonest(reason for _, reason in lost))

    def drop_gone(self, draws: Iterable[Draw]) -> None:
        """Open draws of an earlier process that have no task any more."""
        self._never_credited += [Outcome(draw.id, "task_gone") for draw in draws]

    def take(self, now: float) -> Entries:
        """Everything that may be committed. It includes every sealed group up to the first that is not."""
        outcomes, self._never_credited = self._never_credited, []
        states: dict[str, AlgorithmState] = {}
        while self._credited and self._credited[0].sealed:
            entry = self._credited.popleft()
            del self._entry_of[entry.outcome.draw]
            outcomes.append(entry.outcome)
            if entry.state is not None:
                states[entry.env] = entry.state
        for outcome in outcomes:
            self._totals.add(outcome)
        drawn, self._drawn = self._drawn, []
        return Entries(drawn, outcomes, self._totals.copy(), states, Clock(now - self._began, self._eval_tokens))

    def take_dropped(self) -> list[tuple[Rollout, str]]:
        """The rollouts dropped since the last call, for the dump of a step."""
        dropped = list(self._dropped_rollouts)
        self._dropped_rollouts.clear()
        return dropped

    def take_step_metrics(self, now: float) -> dict[str, float]:
        """Metrics of the step that ends now: its pace, and what was lost on the way."""
        metrics = self._step.metrics(now)
        self._step = _StepCounts(now)
        return metrics

    def progress(self, now: float) -> dict[str, float]:
        """Metrics: counts over the whole run, restarts included."""
        return {
            "progress/rollouts": self._totals.rollouts,
            "progress/tokens_sampled": self._totals.tokens + self._eval_tokens,
            "progress/seconds": now - self._began,
            **{f"progress/dropped/{reason}": count for reason, count in self._totals.drops.items()},
        }

    def _drop_rollouts(self, outcome: Outcome, dropped: Iterable[tuple[Rollout, str]]) -> None:
        for rollout, reason in dropped:
            outcome.drops[reason] = outcome.drops.get(reason, 0) + 1
            self._step.dropped[reason] += 1
            self._dropped_rollouts.append((rollout, reason))

    def _seal(self, draw: int, reason: str) -> None:
        entry = self._entry_of[draw]
        entry.outcome.reason, entry.sealed = reason, True


class _StepCounts:
    """Counts of one step."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.tokens = 0
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.filter_hits: Counter[str] = Counter()

    def metrics(self, now: float) -> dict[str, float]:
        seconds = now - self.began
        return {
            "time/batch": seconds,
            "perf/sampled_tokens_per_second": self.tokens / max(seconds, 1e-9),
            "off_policy/dropped": self.dropped["off_policy"] + self.dropped["on_policy"],
            **{f"errors/{reason}": count for reason, count in self.errors.items()},
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
            **self.filter_hits,
        }


def commonest(reasons: Iterable[str]) -> str:
    """The reason given most often; equal counts are decided by name, so that a replay decides alike."""
    counts = Counter(reasons)
    return max(counts, key=lambda reason: (counts[reason], reason)) if counts else "not_trainable"
