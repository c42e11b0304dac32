"""What the trainer makes of a few sequences with the weights it is about to publish.

The orchestrator has the engine score the same sequences with the same weights: where the two differ, one of the two
implementations rounds, or computes, something else. One forward pass without gradients over about `tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.transport.probes import TRAINER_LOGPROBS, ProbeStore


def write_probe(
    probes: ProbeStore, version: Version, batch: Batch, model: PackedModel, *, tokens: int, seq_len: int, chunk: int
) -> None:
    """Score a few of the batch's sequences with the model as it is now, which is `version`, and write them down.

    To be called by every rank, after the step and before the version is published; the first rank writes.
    `chunk` is how many tokens' logits exist at once.
    """
    chosen = choose(batch.samples, version.step, tokens=tokens, seq_len=seq_len)
    if not chosen:
        return
    logprobs = sampled_logprobs(model, [entry.sample for entry in chosen], chunk)
    if model.ranks.first:
        probes.write(version, [_probed(entry, values) for entry, values in zip(chosen, logprobs, strict=True)])


def choose(samples: Sequence[BatchSample], step: int, *, tokens: int, seq_len: int) -> list[BatchSample]:
    """Sequences with something sampled, in an order that the step decides, until they have `tokens` tokens in all.

    The last is cut there. The first stays whole up to `seq_len`, so that one is probed however long they are.
    """
    chosen: list[BatchSample] = []
    left = tokens
    for index in np.random.default_rng(step).permutation(len(samples)):
        if left <= 0:
            break
        entry = samples[index]
        cut = entry.sample.truncated(left if chosen else max(tokens, seq_len))
        if sampled_places(cut).size:
            chosen.append(msgspec.structs.replace(entry, sample=cut))
            left -= len(cut)
    return chosen


def sampled_places(sample: Sample) -> np.ndarray:
    """Where the tokens are that a policy sampled and the model predicts; nothing predicts the first."""
    sampled = sample.mask & (sample.versions != NOT_SAMPLED)
    sampled[:1] = False
    return np.flatnonzero(sampled)


def sampled_logprobs(model: PackedModel, samples: Sequence[Sample], chunk: int) -> list[np.ndarray]:
    """For each sample, the logprobs of its sampled tokens at its temperature. One forward pass, without gradients."""
    targets = [sampled_places(sample) for sample in samples]
    row = model.row([s.token_ids[: places[-1]] for s, places in zip(samples, targets, strict=True)])

    def flat(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(model.device)

    logprobs = model.logprobs(
        row,
        flat([places[wanted - 1] for places, wanted in zip(row.places, targets, strict=True)]),
        flat([s.token_ids[wanted].astype(np.int64) for s, wanted in zip(samples, targets, strict=True)]),
        flat([np.full(len(wanted), s.temperature, np.float32) for s, wanted in zip(samples, targets, strict=True)]),
        chunk,
    )
    ends = np.cumsum([len(wanted) for wanted in targets])
    return np.split(logprobs.float().cpu().numpy(), ends[:-1])


def _probed(entry: BatchSample, logprobs: np.ndarray) -> BatchSample:
    """The sample with what the trainer finds as its only stream, and a mask that says where."""
    mask, stream = np.zeros(len(entry.sample), np.bool_), np.zeros(len(entry.sample), np.float32)
    mask[places := sampled_places(entry.sample)] = True
    stream[places] = logprobs
    sample = msgspec.structs.replace(entry.sample, mask=mask, streams={TRAINER_LOGPROBS: stream})
    return msgspec.structs.replace(entry, sample=sample)
