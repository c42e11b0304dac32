"""Probes: the trainer's logprobs of a few sequences with the weights it is about to publish.

The orchestrator has the engine score the same sequences with the same weights: a difference is due to rounding or to a
difference between the two implementations. One forward pass without gradients over about `tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.types import Sample
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.transport.batches import TRAINER_LOGPROBS, ProbeStore


def write_probe(
    probes: ProbeStore, version: Version, batch: Batch, model: PackedModel, *, tokens: int, seq_len: int
) -> None:
    """Score a few of the batch's sequences with the current weights, `version`, and write the probe.

    Every rank must call it, after the step and before the version is published; the first rank writes.
    """
    chosen = choose(batch.samples, version.step, tokens=tokens, seq_len=seq_len)
    if not chosen:
        return
    logprobs = sampled_logprobs(model, [entry.sample for entry in chosen])
    if model.ranks.first:
        entries = []
        for entry, values in zip(chosen, logprobs, strict=True):
            mask, stream = np.zeros(len(entry.sample), np.bool_), np.zeros(len(entry.sample), np.float32)
            mask[indices := sampled_indices(entry.sample)] = True
            stream[indices] = values
            sample = msgspec.structs.replace(entry.sample, mask=mask, streams={TRAINER_LOGPROBS: stream})
            entries.append(msgspec.structs.replace(entry, sample=sample))
        probes.write(version, entries)


def choose(samples: Sequence[BatchSample], step: int, *, tokens: int, seq_len: int) -> list[BatchSample]:
    """Return sequences with sampled tokens, in an order seeded by the step, up to `tokens` tokens in total.

    The last one is truncated. The first one is kept up to `seq_len`, so that at least one is probed.
    """
    chosen: list[BatchSample] = []
    left = tokens
    for index in np.random.default_rng(step).permutation(len(samples)):
        if left <= 0:
            break
        entry = samples[index]
        cut = entry.sample.truncated(left if chosen else max(tokens, seq_len))
        if sampled_indices(cut).size:
            chosen.append(msgspec.structs.replace(entry, sample=cut))
            left -= len(cut)
    return chosen


def sampled_indices(sample: Sample) -> np.ndarray:
    """Return the indices of sampled tokens, except for the first token, which is not predicted.

    Also of those that do not train: an engine that computes them differently has a fault all the same.
    """
    sampled = sample.sampled
    sampled[:1] = False
    return np.flatnonzero(sampled)


def sampled_logprobs(model: PackedModel, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return for each sample the logprobs of its sampled tokens at its temperature, in one forward pass."""
    targets = [sampled_indices(sample) for sample in samples]
    row = model.row([s.token_ids[: indices[-1]] for s, indices in zip(samples, targets, strict=True)])

    def flat(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(model.device)

    logprobs = model.logprobs(
        row,
        flat([places[indices - 1] for places, indices in zip(row.places, targets, strict=True)]),
        flat([s.token_ids[indices].astype(np.int64) for s, indices in zip(samples, targets, strict=True)]),
        flat([np.full(len(indices), s.temperature, np.float32) for s, indices in zip(samples, targets, strict=True)]),
    )
    ends = np.cumsum([len(indices) for indices in targets])
    return np.split(logprobs.float().cpu().numpy(), ends[:-1])
