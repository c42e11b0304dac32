"""Buffer of finished training groups until they fill a batch, and the number of episodes needed to fill it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from headrace.orchestrator.signals import ScoredGroup, TrainBatch

WAVE_MARGIN = 1.0
"""Standard deviations of the kept rollouts by which a wave is larger than it must be on average."""
MIN_KEPT_SHARE = 0.125
"""Lowest share of kept rollouts that a wave allows for, so that its size is bounded."""


class _Lengths(msgspec.Struct):
    rollouts: int = 0
    tokens: int = 0


class TrainBuffer:
    """Finished groups, oldest first. A batch is full at `batch_size` rollouts or at `token_batch_size` tokens.

    The rollouts per `token_batch_size` are estimated from the lengths credited in this step and the one before, since
    lengths change with the policy. Before the first credit every rollout is assumed to have `seq_len` tokens.
    """

    def __init__(self, batch_size: int | None, token_batch_size: int | None, seq_len: int) -> None:
        self._batch_size, self._token_batch_size, self._seq_len = batch_size, token_batch_size or 0, seq_len
        self._ready: list[ScoredGroup] = []
        self.rollouts = self.tokens = self._step = 0
        self._lengths, self._previous_lengths = _Lengths(), _Lengths()
        """Credited rollouts and tokens of `_step`, and of the last step before it that had any."""

    @property
    def is_full(self) -> bool:
        return self._fills_batch(self.rollouts, self.tokens)

    @property
    def rollouts_per_batch(self) -> int:
        """Return how many rollouts make a batch, estimated if batches are measured in tokens."""
        return self._batch_size if self._batch_size is not None else self._rollouts_in(self._token_batch_size)

    @property
    def progress(self) -> tuple[str, int, int]:
        """Return the unit of the batch size, how much of it is ready for the next batch, and the batch size."""
        if self._batch_size is not None:
            return "rollouts", min(self.rollouts, self._batch_size), self._batch_size
        return "tokens", min(self.tokens, self._token_batch_size), self._token_batch_size

    def missing(self, batches: int) -> int:
        """Return how many more rollouts fill this number of batches; at least 1 while they are not full."""
        if self._batch_size is not None:
            return max(0, batches * self._batch_size - self.rollouts)
        return self._rollouts_in(max(0, batches * self._token_batch_size - self.tokens))

    def record_lengths(self, step: int, rollouts: int, tokens: int) -> None:
        """Count the tokens of a credited group. Sums are kept by step, so the order within a step is irrelevant."""
        if step > self._step:
            self._step, self._previous_lengths, self._lengths = step, self._lengths, _Lengths()
        self._lengths.rollouts += rollouts
        self._lengths.tokens += tokens

    def add(self, scored: ScoredGroup) -> bool:
        """Add a group with remaining rollouts; return whether there is enough for a batch."""
        self._ready.append(scored)
        self._count(scored, 1)
        return self.is_full

    def drop(self, unwanted: Callable[[ScoredGroup], bool]) -> list[ScoredGroup]:
        """Remove and return the groups that match, for example because they are too old."""
        removed = [group for group in self._ready if unwanted(group)]
        self._remove(removed)
        return removed

    def take_batch(self, *, drawn_first: bool = False) -> TrainBatch | None:
        """Remove the groups that finished first, or were drawn first, and fill a batch; None if there are too few."""
        if not self.is_full:
            return None
        if drawn_first:
            self._ready.sort(key=lambda scored: scored.group.draw_id)
        rollouts = tokens = 0
        for count, group in enumerate(self._ready, 1):
            rollouts += len(group.rollouts)
            tokens += group.tokens
            if self._fills_batch(rollouts, tokens):
                groups = self._ready[:count]
                self._remove(groups)
                return TrainBatch(groups)
        return None

    def _rollouts_in(self, tokens: int) -> int:
        rollouts = self._lengths.rollouts + self._previous_lengths.rollouts
        total = self._lengths.tokens + self._previous_lengths.tokens
        return math.ceil(tokens * rollouts / total) if total else math.ceil(tokens / self._seq_len)

    def _fills_batch(self, rollouts: int, tokens: int) -> bool:
        return tokens >= self._token_batch_size if self._batch_size is None else rollouts >= self._batch_size

    def _remove(self, groups: list[ScoredGroup]) -> None:
        removed = set(map(id, groups))
        self._ready = [group for group in self._ready if id(group) not in removed]
        for group in groups:
            self._count(group, -1)

    def _count(self, group: ScoredGroup, sign: int) -> None:
        self.rollouts += sign * len(group.rollouts)
        self.tokens += sign * group.tokens


class EpisodeCapacity:
    """Estimates how many training episodes to open, from the rollouts per episode of the credited groups.

    `in_waves` (level 0): episodes start in waves, the next one when all episodes of the last are credited, so the speed
    of single episodes has no influence on the batches. The engines run nearly empty at the end of every wave, so a wave
    is larger by the share of rollouts that gates and filters rejected in this step and the one before. Surplus groups
    are dropped when the step ships. The size of a wave depends only on earlier waves, so a resumed run, whose
    interrupted step begins again, has the same waves.
    """

    def __init__(self, *, in_waves: bool, batch_size: int | None = None, group_size: int = 1) -> None:
        """`batch_size`: rollouts per batch, None if batches are measured in tokens; `group_size`: the largest."""
        self.in_waves, self._batch_size, self._group_size = in_waves, batch_size, group_size
        self._rollouts = self._episodes = 0
        self.wave = 0
        """Episodes of the current wave that are not opened yet; negative if its last group is larger than the rest."""
        self._credited: dict[int, int] = {}
        """Credited rollouts of the current step by draw."""
        self._kept = 0
        """Credited rollouts of the current step that gates and filters kept."""
        self._last_credited = self._last_kept = 0
        """Credited and kept rollouts of the previous step, without those after its batch was full."""

    def record_credit(self, rollouts: int, episodes: int) -> None:
        """Count the rollouts that the episodes of a group produced: several agents may play in one episode."""
        self._rollouts += rollouts
        self._episodes += episodes

    def record_kept(self, draw: int, credited: int, kept: int) -> None:
        """Count the credited rollouts of a group of the current step, and what gates and filters kept of them."""
        if self.in_waves:
            self._credited[draw] = credited
            self._kept += kept

    def begin_step(self, surplus: Collection[int], credited: Mapping[int, int] | None = None) -> None:
        """Begin a step. `surplus`: draws of the previous step that were kept, but not needed for its batch.

        `credited`: credited rollouts of the previous step by draw; None: those recorded here. The journal does not have
        the number of kept ones, but draws before the surplus filled the batch with less than a group to spare.
        """
        credited, self._credited, self._kept = self._credited if credited is None else credited, {}, 0
        if self._batch_size is not None:
            end = min(surplus, default=None)
            self._last_credited = sum(count for draw, count in credited.items() if end is None or draw < end)
            self._last_kept = min(self._last_credited, self._batch_size + self._group_size - 1)

    def begin_wave(self, rollouts: int) -> None:
        """Begin the wave that produces `rollouts`. All earlier episodes must be credited.

        Of n groups, each kept with probability p, n * p are kept, with a standard deviation of sqrt(n * p * (1 - p)).
        """
        credited = sum(self._credited.values()) + self._last_credited
        kept = max(MIN_KEPT_SHARE, (self._kept + self._last_kept) / credited) if credited else 1.0
        margin = WAVE_MARGIN * math.sqrt(rollouts * self._group_size * max(0.0, 1 - kept))
        self.wave = self.episodes_for(math.ceil((rollouts + margin) / kept), in_processing=0)

    @property
    def rest_of_wave(self) -> int:
        return max(0, self.wave)

    def episodes_for(self, rollouts: int, in_processing: int) -> int:
        """Return the episodes to open for `rollouts`, besides the `in_processing` ones whose groups are being credited.

        An episode counts for at least one rollout: failed episodes are replaced, not anticipated.
        """
        per_episode = max(1.0, self._rollouts / self._episodes) if self._episodes else 1.0
        return max(0, math.ceil(rollouts / per_episode) - in_processing)
