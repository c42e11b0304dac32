"""Buffer of draws and outcomes since the last commit to the journal, and the totals of the run.

Groups are added and committed in the order in which they were credited: a commit takes the longest prefix of groups
with a final outcome. It includes the algorithms' states right after its last group, so the journal always has a state
that the algorithm really had, and no open draw contributed to it. Dropped rollouts are kept with the outcome of their
draw, so that a rollout file and the journal agree after any kill.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from headrace.orchestrator.signals import ScoredGroup, TrainBatch
from headrace.rollout.types import Rollout
from headrace.transport.journal_entries import NOT_TRAINABLE, AlgorithmState, Clock, Draw, Entries, Outcome, Totals


class _Entry(msgspec.Struct):
    """A processed group that is not committed."""

    env: str
    outcome: Outcome
    state: AlgorithmState | None = None
    final: bool = False
    dropped: list[tuple[Rollout, str]] = msgspec.field(default_factory=list)


class JournalBuffer:
    """Collects outcomes on the event loop; `take_entries` returns what can be committed, on another thread."""

    def __init__(self, totals: Totals, clock: Clock, next_credit: int, now: float) -> None:
        self._totals = totals
        self._eval_tokens = clock.eval_tokens
        self._began = now - clock.seconds
        self._next_credit = next_credit
        self.drawn: list[Draw] = []
        """Draws since the last commit."""
        self._credited: deque[_Entry] = deque()
        """Groups in the order of credit."""
        self._entry_of: dict[int, _Entry] = {}
        """Credited groups by draw."""
        self._never_credited: list[_Entry] = []
        self._step = _StepCounts(now)

    @property
    def has_outcomes(self) -> bool:
        """Return whether a commit would record the outcome of a draw."""
        return bool(self._never_credited) or bool(self._credited and self._credited[0].final)

    def count_rollouts(self, rollouts: Iterable[Rollout], *, training: bool) -> None:
        """Count the tokens and errors of an episode."""
        for rollout in rollouts:
            self._step.tokens += rollout.completion_tokens
            if not training:
                self._eval_tokens += rollout.completion_tokens
            elif rollout.error is not None:
                self._step.errors[rollout.error.reason] += 1

    def add_group(self, scored: ScoredGroup) -> None:
        """Add a processed training group; its outcome is final if no rollout remains."""
        outcome = Outcome(scored.group.draw_id, rollouts=scored.arrived, tokens=scored.sampled_tokens)
        entry = _Entry(scored.group.task.env, outcome, scored.state)
        reason = scored.reason or most_common_reason(reason for _, reason in scored.dropped)
        self._step.filter_hits.update(scored.filter_hits)
        self._drop_rollouts(entry, scored.dropped)
        entry.dropped += [(rollout, NOT_TRAINABLE) for rollout in scored.untrainable]
        if scored.credited:
            outcome.credit, outcome.rewards = self._next_credit, scored.credited
            outcome.credited_tokens = scored.credited_tokens
            self._next_credit += 1
            self._credited.append(entry)
            self._entry_of[outcome.draw] = entry
            if not scored.rollouts:
                self._finalize(outcome.draw, reason)
        else:
            outcome.reason = reason
            self._never_credited.append(entry)

    def drop_groups(self, groups: Iterable[ScoredGroup], reason: str) -> None:
        """Drop whole groups that were added before."""
        for group in groups:
            self._drop_rollouts(self._entry_of[group.group.draw_id], [(rollout, reason) for rollout in group.rollouts])
            self._finalize(group.group.draw_id, reason)

    def finalize_batch(self, batch: TrainBatch) -> None:
        """Finalize the groups of a processed batch. Draws without a kept rollout are dropped."""
        self._step.filter_hits.update(batch.filter_hits)
        dropped: dict[int, list[tuple[Rollout, str]]] = {}
        for rollout, reason in batch.dropped:
            dropped.setdefault(rollout.draw_id, []).append((rollout, reason))
        kept = {rollout.draw_id for rollout in batch.kept}
        for group in batch.groups:
            draw = group.group.draw_id
            dropped_here = dropped.get(draw, [])
            self._drop_rollouts(self._entry_of[draw], dropped_here)
            self._finalize(draw, "" if draw in kept else most_common_reason(reason for _, reason in dropped_here))

    def drop_missing(self, draws: Iterable[Draw]) -> None:
        """Drop open draws of an earlier process whose task no longer exists."""
        self._never_credited += [_Entry(draw.env, Outcome(draw.id, "task_gone")) for draw in draws]

    def take_entries(self, now: float) -> Entries:
        """Remove and return everything that can be committed: all groups before the first that is not final."""
        final, self._never_credited = self._never_credited, []
        while self._credited and self._credited[0].final:
            entry = self._credited.popleft()
            del self._entry_of[entry.outcome.draw]
            final.append(entry)
        for entry in final:
            self._totals.add(entry.outcome)
        drawn, self.drawn = self.drawn, []
        return Entries(
            drawn,
            [entry.outcome for entry in final],
            self._totals.copy(),
            {entry.env: entry.state for entry in final if entry.state is not None},
            Clock(now - self._began, self._eval_tokens),
            [pair for entry in final for pair in entry.dropped],
        )

    def take_step_metrics(self, now: float) -> dict[str, float]:
        """Return the throughput, errors and drops of the step that ends now."""
        metrics = self._step.metrics(now)
        self._step = _StepCounts(now)
        return metrics

    def progress(self, now: float) -> dict[str, float]:
        """Return counts over the whole run, restarts included."""
        return {
            "progress/rollouts": self._totals.rollouts,
            "progress/tokens_sampled": self._totals.tokens + self._eval_tokens,
            "progress/seconds": now - self._began,
            **{f"progress/dropped/{reason}": count for reason, count in self._totals.drops.items()},
        }

    def _drop_rollouts(self, entry: _Entry, dropped: Iterable[tuple[Rollout, str]]) -> None:
        for rollout, reason in dropped:
            entry.outcome.drops[reason] = entry.outcome.drops.get(reason, 0) + 1
            self._step.dropped[reason] += 1
            entry.dropped.append((rollout, reason))

    def _finalize(self, draw: int, reason: str) -> None:
        entry = self._entry_of[draw]
        entry.outcome.reason, entry.final = reason, True


class _StepCounts(msgspec.Struct):
    """Tokens, errors, drops and filter matches of one step; `began` is on the pipeline's clock."""

    began: float
    tokens: int = 0
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    filter_hits: Counter[str] = msgspec.field(default_factory=Counter)

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


def most_common_reason(reasons: Iterable[str]) -> str:
    """Return the most frequent reason; the last by name of several, so that a replay gives the same result."""
    counts = Counter(reasons)
    return max(counts, key=lambda reason: (counts[reason], reason)) if counts else NOT_TRAINABLE
