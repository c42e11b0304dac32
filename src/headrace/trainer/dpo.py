"""Training on preference pairs: direct preference optimization, with the loop of SFT.

Of a pair, let r be the sum of t - ref over the trained tokens of a completion, where t is the trainer's logprob and ref
the reference's (0 without a reference), and n the number of these tokens:

    margin     beta * (r(chosen) - r(rejected)); a pair is accurate if it is above 0
    sigmoid    -log sigmoid(margin)
    ipo        (r(chosen) / n(chosen) - r(rejected) / n(rejected) - 1 / (2 * beta))**2

The loss takes the place of the rl component: chosen tokens have the advantage 1, rejected ones -1. It is a mean over
pairs; a pair is never split over micro-batches, and shares the tokens of its prompt.

The reference is the start of the run. With an adapter each step computes it by a forward pass with the adapter of the
start, whose product is 0. Otherwise it is computed before the first step for all data, and kept in the run directory
(`reference/`).
"""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace.config.dpo import DpoConfig
from headrace.config.sft import OfflineConfig
from headrace.config.trainer import ReferenceConfig
from headrace.rollout.schema import DamagedFile
from headrace.rollout.types import Sample
from headrace.trainer.checkpoint import ResumeError
from headrace.trainer.loss import LossOutputs, PackedInputs, masked_mean
from headrace.trainer.sft import SftTrainer, sequence_logprobs
from headrace.trainer.sft_data import Example, Rows
from headrace.transport.digests import check_directory

log = logging.getLogger(__name__)

PAIRS_PER_CHUNK = 256
"""Pairs that the reference scores at a time: progress is shown in between."""


def pair_loss(inputs: PackedInputs, *, loss: str, beta: float) -> LossOutputs:
    """Return the loss of pairs, which are the sequences 2k and 2k + 1."""
    ratios = inputs.trainer_logprobs if inputs.ref_logprobs is None else inputs.trainer_logprobs - inputs.ref_logprobs

    def per_pair(values: Tensor, members: Tensor) -> Tensor:
        """Return the sum over the members of each pair; zeros follow, since there are more tokens than pairs."""
        return values.new_zeros(values.shape).index_add(0, inputs.sequences // 2, values.where(members, 0.0))

    sides = [inputs.loss_mask & (inputs.advantages > 0), inputs.loss_mask & (inputs.advantages < 0)]
    chosen, rejected = (per_pair(ratios, side) for side in sides)
    lengths = [per_pair(ratios.new_ones(ratios.shape), side) for side in sides]
    exists = lengths[0] > 0
    margins = beta * (chosen - rejected)
    if loss == "ipo":
        per_token = chosen / lengths[0].clamp(min=1) - rejected / lengths[1].clamp(min=1)
        losses = (per_token - 1 / (2 * beta)) ** 2
    else:
        losses = -logsigmoid(margins)
    metrics = {
        "dpo/accuracy": masked_mean((margins > 0).to(margins.dtype), exists),
        "dpo/margin": masked_mean(margins, exists),
        "dpo/chosen_reward": masked_mean(beta * chosen, exists),
        "dpo/rejected_reward": masked_mean(beta * rejected, exists),
    }
    return LossOutputs(losses.where(exists, 0.0).sum(), metrics)


class ReferenceTotals:
    """The reference's logprob of each completion, by a digest of its sequence."""

    FILE = "logprobs.safetensors"

    def __init__(self, totals: dict[int, float], seq_len: int) -> None:
        self._totals, self._seq_len = totals, seq_len

    def key(self, sample: Sample) -> int:
        parts = (sample.token_ids[: self._seq_len], sample.mask[: self._seq_len])
        digest = hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8)
        return int.from_bytes(digest.digest(), signed=True)

    def add(self, samples: list[Sample], totals: np.ndarray) -> None:
        self._totals.update(zip(map(self.key, samples), totals.tolist(), strict=True))

    def look_up(self, samples: list[Sample]) -> np.ndarray:
        """Return the total of each sample; raise for one that was not scored when the run started."""
        totals = [self._totals.get(self.key(sample)) for sample in samples]
        if missing := totals.count(None):
            fact = (
                f"the reference has not scored {missing} of {len(samples)} sequences: data, seq_len or renderer have "
                "changed since the run started, and its start model is gone"
            )
            raise ResumeError(fact, key="data", fix="Restore them, or start a new run.")
        return np.array(totals, np.float64)

    def write(self, directory: Path) -> None:
        keys, totals = np.array(list(self._totals), np.int64), np.array(list(self._totals.values()), np.float64)
        save_file({"keys": keys, "totals": totals}, directory / self.FILE)

    @classmethod
    def read(cls, directory: Path, seq_len: int) -> ReferenceTotals | None:
        """Return the totals that were written; None if there are none."""
        if not directory.is_dir():
            return None
        for check in check_directory(directory):
            if isinstance(check, DamagedFile):
                raise check
        tensors = load_file(directory / cls.FILE)
        return cls(dict(zip(tensors["keys"].tolist(), tensors["totals"].tolist(), strict=True)), seq_len)


class DpoTrainer(SftTrainer):
    """The training loop of one process (rank) of a DPO run."""

    COMPONENT, UNIT_SIZE = "rl", 2
    config: DpoConfig
    reference: ReferenceTotals | None = None
    """The reference of a run without an adapter."""

    def __init__(self, config: OfflineConfig, **options: Any) -> None:
        assert isinstance(config, DpoConfig)
        loss = partial(pair_loss, loss=config.dpo.loss, beta=config.dpo.beta)
        reference = ReferenceConfig() if config.keeps_reference else None
        super().__init__(config, loss=loss, reference=reference, **options)

    def _prepare(self, rows: Rows | None, held_out: list[Example]) -> None:
        """Score all data with the start model, unless that is done or an adapter's base model scores each step."""
        learner, directory = self.learner, self.run_dir.reference
        if self.config.dpo.reference_free or learner.reference is not None:
            return
        if learner.state.step > 0:
            self.reference = ReferenceTotals.read(directory, learner.seq_len)
            if self.reference is None:
                fact = "the reference's logprobs are missing, and the start model is gone"
                raise ResumeError(fact, file=directory, fix="Copy them from the run that this one continues.")
            return
        assert rows is not None  # pairs have no other source
        reference = ReferenceTotals({}, learner.seq_len)
        done, total = 0, len(rows) + len(held_out)
        self.status.set("scoring with the reference")
        pairs = chain(map(rows.__getitem__, range(len(rows))), held_out)
        while examples := list(islice(pairs, PAIRS_PER_CHUNK)):
            self.status.advance("pair", done, total)
            samples = self._render(examples)
            totals = sequence_logprobs(learner.model, samples, learner.seq_len, self.stopped.is_set)
            if totals is None:
                return
            reference.add(samples, totals)
            done += len(examples)
        learner.ranks.write_directory(directory, reference.write if learner.ranks.is_first else lambda draft: None)
        self.reference = reference

    def _add_reference(self, samples: list[Sample]) -> list[Sample] | None:
        """Set the reference's logprob of each completion, as a whole on its first trained token."""
        learner = self.learner
        if self.config.dpo.reference_free:
            return samples
        if learner.reference is not None:
            with learner.reference.swapped_in():
                totals = sequence_logprobs(learner.model, samples, learner.seq_len, self.stopped.is_set)
        else:
            totals = None if self.reference is None else self.reference.look_up(samples)
        if totals is None:
            return None
        for sample, total in zip(samples, totals, strict=True):
            logprobs = np.zeros(len(sample), np.float32)
            logprobs[sample.mask.argmax()] = total
            sample.set_stream("ref_logprobs", logprobs)
        return samples
