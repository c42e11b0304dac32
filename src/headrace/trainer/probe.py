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
from headrace.rollout.types import ROUTES, Sample
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.transport.batches import REPLAYED_LOGPROBS, TRAINER_LOGPROBS, ProbeStore


def write_probe(
    probes: ProbeStore, version: Version, batch: Batch, model: PackedModel, *, tokens: int, seq_len: int
) -> None:
    """Score a few of the batch's sequences with the current weights, `version`, and write the probe.

    Every rank must call it, after the step and before the version is published; the first rank writes.
    """
    chosen = choose_samples(batch.samples, version.step, tokens=tokens, seq_len=seq_len)
    if not chosen:
        return
    samples = [entry.sample for entry in chosen]
    logprobs = {TRAINER_LOGPROBS: sampled_logprobs(model, samples)}
    if model.routing.mode != "off" and all(ROUTES in sample.streams for sample in samples):
        logprobs[REPLAYED_LOGPROBS] = sampled_logprobs(model, samples, follow_routes=True)
    if model.ranks.is_first:
        entries = []
        for number, entry in enumerate(chosen):
            mask = np.zeros(len(entry.sample), np.bool_)
            mask[indices := sampled_indices(entry.sample)] = True
            streams = {name: np.zeros(len(mask), np.float32) for name in logprobs}
            for name, stream in streams.items():
                stream[indices] = logprobs[name][number]
            sample = msgspec.structs.replace(entry.sample, mask=mask, streams=streams)
            entries.append(msgspec.structs.replace(entry, sample=sample))
        probes.write(version, entries)


def choose_samples(samples: Sequence[BatchSample], step: int, *, tokens: int, seq_len: int) -> list[BatchSample]:
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


def sampled_logprobs(model: PackedModel, samples: Sequence[Sample], *, follow_routes: bool = False) -> list[np.ndarray]:
    """Return for each sample the logprobs of its sampled tokens at its temperature, in one forward pass.

    `follow_routes`: with the experts that were recorded when they were sampled.
    """
    targets = [sampled_indices(sample) for sample in samples]

    def inputs(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [array[: indices[-1]] for array, indices in zip(arrays, targets, strict=True)]

    routes = inputs([sample.streams[ROUTES] for sample in samples]) if follow_routes else None
    row = model.pack_row(inputs([sample.token_ids for sample in samples]), routes)

    def flat(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(model.device)

    logprobs = model.logprobs(
        row,
        flat([places[indices - 1] for places, indices in zip(row.places, targets, strict=True)]),
        flat([s.token_ids[indices].astype(np.int64) for s, indices in zip(samples, targets, strict=True)]),
        flat([np.full(len(indices), s.temperature, np.float32) for s, indices in zip(samples, targets, strict=True)]),
        follow_routes=follow_routes,
    )
    ends = np.cumsum([len(indices) for indices in targets])
    return np.split(logprobs.float().cpu().numpy(), ends[:-1])
