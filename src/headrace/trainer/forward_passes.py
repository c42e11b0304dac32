"""Forward passes over fixed samples without gradients, packed and spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.rollout.packing import pack_for_worker
from headrace.rollout.types import Sample
from headrace.trainer.model import PackedModel
from headrace.trainer.packed_row import on_device
from headrace.trainer.step import MICRO_BATCH_TOKENS
from headrace.trainer.tokens import MicroBatch, StepTokens


class ForwardPasses:
    """The samples of this rank as micro-batches; `together` as in `StepTokens`."""

    def __init__(self, model: PackedModel, samples: list[Sample], seq_len: int, together: int = 1) -> None:
        self.model, self.ranks = model, model.ranks
        ranks = model.ranks
        bins = pack_for_worker(ranks.index, samples, seq_len, ranks.size, model.cost, together=together)
        self.tokens = StepTokens(bins, together)
        self._groups = self.tokens.cut(max(seq_len, MICRO_BATCH_TOKENS))
        self.count = ranks.most(len(self._groups))
        """Micro-batches, the same on every rank, since they run collectives."""

    def run(self, consume: Callable[[MicroBatch, torch.Tensor], None], stopped: Callable[[], bool]) -> bool:
        """Call `consume` with each micro-batch and the logprobs of its scored tokens; return False if `stopped`."""
        for number in range(self.count):
            if self.ranks.any(stopped()):
                return False
            group = self._groups[number] if number < len(self._groups) else []
            batch = self.tokens.micro_batch(group, self.model.device, self.model.kernel)
            consume(batch, self.model.logprobs(batch.row, batch.predictors, batch.labels, batch.temperatures))
        return True


def sequence_logprobs(
    model: PackedModel, samples: list[Sample], seq_len: int, stopped: Callable[[], bool]
) -> np.ndarray | None:
    """Return for each sample the sum of the logprobs of its trained tokens, float64, on every rank; None if stopped."""
    passes, device = ForwardPasses(model, samples, seq_len), model.device
    totals = torch.zeros(len(samples), dtype=torch.float64, device=device)

    def add(batch: MicroBatch, logprobs: torch.Tensor) -> None:
        sequences = np.searchsorted(passes.tokens.starts, batch.scored, side="right") - 1
        totals.index_add_(0, on_device(passes.tokens.sources[sequences], device), logprobs.double())

    return model.ranks.add_up(totals).cpu().numpy() if passes.run(add, stopped) else None
