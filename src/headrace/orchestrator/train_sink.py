"""Finished training groups, oldest first, until they fill a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.orchestrator.signals import ScoredGroup, TrainBatch


class TrainSink:
    """A batch is full at `batch_size` rollouts or at `token_batch_size` tokens, whichever of the two is set."""

    def __init__(self, batch_size: int | None, token_batch_size: int | None, seq_len: int) -> None:
        self._batch_size = batch_size
        self._token_batch_size = token_batch_size
        self._seq_len = seq_len
        self._ready: list[ScoredGroup] = []
        self.rollouts = 0
        self.tokens = 0

    @property
    def full(self) -> bool:
        return self._fills(self.rollouts, self.tokens)

    @property
    def rollouts_per_batch(self) -> int:
        """How many make a batch; for batches by tokens, judged by the length of those that are here."""
        if self._batch_size is not None:
            return self._batch_size
        assert self._token_batch_size is not None
        per_token = self.rollouts / self.tokens if self.tokens else 1 / self._seq_len
        estimate = math.ceil(self._token_batch_size * per_token)
        return estimate if self.full else max(estimate, self.rollouts + 1)

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

    def _fills(self, rollouts: int, tokens: int) -> bool:
        if self._batch_size is not None:
            return rollouts >= self._batch_size
        return tokens >= (self._token_batch_size or 0)

    def _count(self, group: ScoredGroup, sign: int) -> None:
        self.rollouts += sign * len(group.rollouts)
        self.tokens += sign * group.tokens
