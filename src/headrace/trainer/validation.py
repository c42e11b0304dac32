"""The loss on examples that are not trained on, through the packing and scoring of training.

The set is rendered once and stays the same, so that one validation can be compared with another. Left out on purpose:
accuracy and anything that has to sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.errors import DataError
from headrace.rollout.packing import pack_for_worker
from headrace.rollout.types import Sample
from headrace.trainer.loss import ce_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.step import MICRO_BATCH_TOKENS
from headrace.trainer.tokens import MicroBatch, StepTokens


class Validation:
    """A fixed set of examples, each rank's share packed and ready."""

    def __init__(
        self, model: PackedModel, samples: list[Sample], seq_len: int, *, interval: int, lm_head_chunk: int
    ) -> None:
        self._interval = interval
        self._model = model
        self._ranks = ranks = model.ranks
        self._lm_head_chunk = lm_head_chunk
        self._tokens = StepTokens(pack_for_worker(ranks.index, samples, seq_len, ranks.size, model.cost))
        self._groups = self._tokens.cut(max(seq_len, MICRO_BATCH_TOKENS))
        self._passes = ranks.most(len(self._groups))  # collectives must meet, so every rank runs as often
        if self._passes == 0:
            raise DataError(
                f"validation: none of {len(samples)} examples has anything to learn within {seq_len} tokens"
            )

    def is_due(self, step: int) -> bool:
        return step % self._interval == 0

    def loss(self, stopped: Callable[[], bool] = lambda: False) -> float | None:
        """The mean cross-entropy of a learned token; None if `stopped` says so on the way."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._model.device)
        for number in range(self._passes):
            if self._ranks.any(stopped()):
                return None
            group = self._groups[number] if number < len(self._groups) else []
            sums += self._nll(self._tokens.micro_batch(group, self._model.device, self._model.kernel))
        total, count = self._ranks.add_up(sums).tolist()
        return float(total / count)

    def _nll(self, batch: MicroBatch) -> torch.Tensor:
        """Sum and number of the learned tokens' cross-entropies."""
        device = self._model.device
        labels = torch.from_numpy(self._tokens.token_ids[batch.scored].astype(np.int64)).to(device)
        temperatures = torch.ones(len(labels), device=device)
        logprobs = self._model.logprobs(batch.row, batch.predictors, labels, temperatures, self._lm_head_chunk)
        total, count = ce_loss(self._tokens.loss_inputs("ce", batch, logprobs)).metrics["ce/nll"]
        return torch.stack([total.double(), count.double()])
