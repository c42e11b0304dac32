"""Validation loss on held-out examples, with the packing and scoring of training.

The set is rendered once and stays the same, so that validations are comparable. Left out on purpose: accuracy, and
everything that needs sampling.
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
from headrace.trainer.tokens import StepTokens


class Validation:
    """A fixed set of examples; each rank has its share packed."""

    def __init__(
        self, model: PackedModel, samples: list[Sample], seq_len: int, *, interval: int, lm_head_chunk: int
    ) -> None:
        self._interval = interval
        self._model = model
        self._ranks = ranks = model.ranks
        self._lm_head_chunk = lm_head_chunk
        self._tokens = StepTokens(pack_for_worker(ranks.index, samples, seq_len, ranks.size, model.cost))
        self._groups = self._tokens.cut(max(seq_len, MICRO_BATCH_TOKENS))
        self._passes = ranks.most(len(self._groups))  # the same on every rank, since they run collectives
        if self._passes == 0:
            raise DataError(f"validation: none of {len(samples)} examples has trained tokens within {seq_len} tokens")

    def is_due(self, step: int) -> bool:
        return step % self._interval == 0

    def loss(self, stopped: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean cross-entropy of trained tokens; None if `stopped`."""
        device = self._model.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for number in range(self._passes):
            if self._ranks.any(stopped()):
                return None
            group = self._groups[number] if number < len(self._groups) else []
            batch = self._tokens.micro_batch(group, device, self._model.kernel)
            labels = torch.from_numpy(self._tokens.token_ids[batch.scored].astype(np.int64)).to(device)
            temperatures = torch.ones(len(labels), device=device)
            logprobs = self._model.logprobs(batch.row, batch.predictors, labels, temperatures, self._lm_head_chunk)
            nll, members = ce_loss(self._tokens.loss_inputs("ce", batch, logprobs)).metrics["ce/nll"]
            sums += torch.stack([nll.double(), members.double()])
        total, count = self._ranks.add_up(sums).tolist()
        return float(total / count)
