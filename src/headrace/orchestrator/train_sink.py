"""Finished training groups, oldest first, until they fill a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headrace.orchestrator.signals import ScoredGroup, TrainBatch


class _Lengths(msgspec.Struct):
    rollouts: int = 0
    tokens: int = 0


class TrainSink:
    """A batch is full at `batch_size` rollouts or at `token_batch_size` tokens, whichever of the two is set.

    How many rollouts make a batch by tokens is judged by the lengths of those credited in this step and the one before:
    lengths change as the policy does. Until the first are known, each may be as long as `seq_len`.
    """

    def __init__(self, batch_size: int | None, token_batch_size: int | None, seq_len: int) -> None:
        self._batch_size = batch_size
        self._token_batch_size = token_batch_size
        self._seq_len = seq_len
        self._ready: list[ScoredGroup] = []
        self.rollouts = 0
        self.tokens = 0
        self._step = 0
        self._seen = _Lengths()
        self._seen_before = _Lengths()
        """Of `_step`, and of the step before it that had any."""

    @property
    def full(self) -> bool:
        return self._fills(self.rollouts, self.tokens)

    @property
    def rollouts_per_batch(self) -> int:
        """How many make a batch, as far as that is known."""
        return self._batch_size if self._batch_size is not None else self._rollouts_in(self._token_batch_size or 0)

    @property
    def filling(self) -> tuple[str, int, int]:
        """The unit of a batch's size, how many there are for the next one, and how many it takes."""
        if self._batch_size is not None:
            return "rollouts", min(self.rollouts, self._batch_size), self._batch_size
        total = self._token_batch_size or 0
        return "tokens", min(self.tokens, total), total

    def missing(self, batches: int) -> int:
        """How many more it takes for so many batches; at least 1 as long as they are not full."""
        if self._batch_size is not None:
            return max(0, batches * self._batch_size - self.rollouts)
        return self._rollouts_in(max(0, batches * (self._token_batch_size or 0) - self.tokens))

    def credited(self, step: int, rollouts: int, tokens: int) -> None:
        """So long were those of a group, whatever becomes of them. Kept by step, so that no order within it matters."""
        if step > self._step:
            self._step, self._seen_before, self._seen = step, self._seen, _Lengths()
        self._seen.rollouts += rollouts
        self._seen.tokens += tokens

    def add(self, scored: ScoredGroup) -> bool:
        """Keep a group of which something is left. True if there is enough for a batch now."""
        self._ready.append(scored)
        self._count(scored, 1)
        return self.full

    def drop(self, unwanted: Callable[[ScoredGroup], bool]) -> list[ScoredGroup]:
        """Take groups out again, for example because they have aged past use."""
        kept: list[ScoredGroup] = []
        gone: list[ScoredGroup] = []
        for group in self._ready:
            (gone if unwanted(group) else kept).append(group)
        self._ready = kept
        for group in gone:
            self._count(group, -1)
        return gone

    def take_batch(self, *, drawn_first: bool = False) -> TrainBatch | None:
        """The groups that finished first, or were drawn first, and make a batch; None if there are too few."""
        if not self.full:
            return None
        if drawn_first:
            self._ready.sort(key=lambda scored: scored.group.draw_id)
        rollouts = tokens = 0
        for count, group in enumerate(self._ready, 1):
            rollouts += len(group.rollouts)
            tokens += group.tokens
            if self._fills(rollouts, tokens):
                groups, self._ready = self._ready[:count], self._ready[count:]
                for taken in groups:
                    self._count(taken, -1)
                return TrainBatch(groups)
        return None

    def _rollouts_in(self, tokens: int) -> int:
        rollouts = self._seen.rollouts + self._seen_before.rollouts
        seen = self._seen.tokens + self._seen_before.tokens
        return math.ceil(tokens * rollouts / seen) if seen else math.ceil(tokens / self._seq_len)

    def _fills(self, rollouts: int, tokens: int) -> bool:
        if self._batch_size is not None:
            return rollouts >= self._batch_size
        return tokens >= (self._token_batch_size or 0)

    def _count(self, group: ScoredGroup, sign: int) -> None:
        self.rollouts += sign * len(group.rollouts)
        self.tokens += sign * group.tokens
